// One process of llama.cpp or ik_llama.cpp for bench_peers.py: the same source is built against each library.
//
//   client quantize IN.gguf OUT.gguf THREADS                          to Q4_0
//   client run MODEL.gguf IDS THREADS COMMAND...                      one JSON object per command
//     logits:LENGTH:COUNT:FILE      logits after each of COUNT prompts of LENGTH ids, fp32, into FILE
//     prefill:LENGTH                seconds of a prompt
//     decode:BATCH:CONTEXT:STEPS    ms of each step, and of its part before the head
//
// IDS is a file of int32 token ids. A context to decode from is allocated without being computed (its cache holds
// zeros), because the time does not depend on the values.

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double status_gb(const std::string & key) {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
        if (line.rfind(key + ":", 0) == 0) return 1024.0 * std::atof(line.c_str() + key.size() + 1) / 1e9;
    return 0;
}

static std::string memory() {
    std::ostringstream out;
    out << "\"rss_gb\": " << status_gb("VmRSS") << ", \"own_gb\": " << status_gb("RssAnon") << ", \"peak_gb\": " << status_gb("VmHWM");
    return out.str();
}

static void require(bool condition, const char * message) {
    if (!condition) { std::fprintf(stderr, "client: %s\n", message); std::exit(1); }
}

// Watches the nodes of the graph: cancels it after its first node, or notes when the last norm is computed.
struct Watch { bool cancel = false; double normed = 0; };

static bool on_node(ggml_tensor * node, bool ask, void * data) {
    auto & watch = *static_cast<Watch *>(data);
    if (ask) return watch.cancel || std::strcmp(node->name, "result_norm") == 0;
    watch.normed = now();
    return !watch.cancel;
}

// Fields that only one of the two libraries has are set where they exist.
static llama_model * load(const char * path) {
    auto fill = [](auto params) {
        if constexpr (requires { params.repack_tensors; }) params.repack_tensors = true;
        if constexpr (requires { params.mla; }) params.mla = 3;
        return params;
    };
    return llama_model_load_from_file(path, fill(llama_model_default_params()));
}

class Session {
  public:
    Session(llama_model * model, int threads, int sequences, int context) : batch(llama_batch_init(kBatch, 0, 1)) {
        auto fill = [&](auto params) {
            params.n_ctx = sequences * ((context + 255) / 256 * 256);
            params.n_batch = kBatch;
            params.n_seq_max = sequences;
            params.n_threads = params.n_threads_batch = threads;
            params.cb_eval = on_node;
            params.cb_eval_user_data = &watch;
            // Dense attention is the same function up to 2048 tokens.
            if constexpr (requires { params.dsa; }) params.dsa = context > 2048 + 256;
            return params;
        };
        ctx = llama_init_from_model(model, fill(llama_context_default_params()));
        require(ctx, "no context");
    }
    ~Session() { llama_batch_free(batch); llama_free(ctx); }

    void clear() { batch.n_tokens = 0; }
    void add(llama_token id, int position, int sequence, bool output) {
        const int i = batch.n_tokens++;
        batch.token[i] = id;
        batch.pos[i] = position;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = output;
    }
    void decode() { require(llama_decode(ctx, batch) == 0, "llama_decode failed"); }

    // Feeds a prompt to a sequence; returns the logits of its last token.
    const float * prompt(const llama_token * ids, int length, int sequence, bool output) {
        for (int begin = 0; begin < length; begin += kBatch) {
            const int end = std::min(length, begin + kBatch);
            clear();
            for (int i = begin; i < end; ++i) add(ids[i], i, sequence, output && i == length - 1);
            decode();
        }
        return output ? llama_get_logits_ith(ctx, batch.n_tokens - 1) : nullptr;
    }

    static constexpr int kBatch = 2048;
    Watch watch;
    llama_batch batch;
    llama_context * ctx = nullptr;
};

static std::string list(const std::vector<double> & values) {
    std::ostringstream out;
    for (double value : values) out << (out.tellp() ? ", " : "") << value;
    return "[" + out.str() + "]";
}

static void logits(llama_model * model, const std::vector<llama_token> & ids, int threads, int length, int count,
                   const std::string & path) {
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::ofstream file(path, std::ios::binary);
    for (int i = 0; i < count; ++i) {
        Session session(model, threads, 1, length);
        const float * row = session.prompt(ids.data() + i * length, length, 0, true);
        require(row, "no logits");
        file.write(reinterpret_cast<const char *>(row), sizeof(float) * vocabulary);
    }
    require(bool(file.flush()), "the logits could not be written");
}

static double prefill(llama_model * model, const std::vector<llama_token> & ids, int threads, int length) {
    Session session(model, threads, 2, length);
    session.prompt(ids.data(), std::min(length, 512), 1, true);  // touches the buffers
    const double begin = now();
    require(session.prompt(ids.data(), length, 0, true), "no logits");
    return now() - begin;
}

static void decode(llama_model * model, const std::vector<llama_token> & ids, int threads, int batch, int context,
                   int steps, std::vector<double> & whole, std::vector<double> & body) {
    const int warm = 2;
    Session session(model, threads, batch, context + warm + steps);
    session.watch.cancel = true;
    for (int i = 0; i < batch; ++i) session.prompt(ids.data(), context, i, false);
    session.watch.cancel = false;
    for (int step = 0; step < warm + steps; ++step) {
        session.clear();
        for (int i = 0; i < batch; ++i) session.add(ids[(step * batch + i) % ids.size()], context + step, i, true);
        session.watch.normed = 0;
        const double begin = now();
        session.decode();
        require(llama_get_logits_ith(session.ctx, batch - 1), "no logits");
        const double end = now();
        require(session.watch.normed > 0, "the graph has no node result_norm");
        if (step < warm) continue;
        whole.push_back(1e3 * (end - begin));
        body.push_back(1e3 * (session.watch.normed - begin));
    }
}

static int run(char ** arguments, int count) {
    const double begin = now();
    llama_model * model = load(arguments[0]);
    require(model, "the model could not be loaded");
    std::ifstream file(arguments[1], std::ios::binary | std::ios::ate);
    std::vector<llama_token> ids(file.tellg() / sizeof(llama_token));
    file.seekg(0).read(reinterpret_cast<char *>(ids.data()), sizeof(llama_token) * ids.size());
    const int threads = std::atoi(arguments[2]);
    const double loaded = now() - begin;
    prefill(model, ids, threads, 64);  // touches every weight
    std::printf("{\"command\": \"load\", \"seconds\": %g, %s}\n", loaded, memory().c_str());
    for (int i = 3; i < count; ++i) {
        std::istringstream words(arguments[i]);
        std::vector<std::string> word;
        for (std::string part; std::getline(words, part, ':');) word.push_back(part);
        auto number = [&](size_t at) { require(at < word.size(), "a number is missing"); return std::atoi(word[at].c_str()); };
        std::printf("{\"command\": \"%s\"", arguments[i]);
        if (word[0] == "logits") {
            logits(model, ids, threads, number(1), number(2), word.at(3));
        } else if (word[0] == "prefill") {
            std::printf(", \"seconds\": %g", prefill(model, ids, threads, number(1)));
        } else {
            std::vector<double> whole, body;
            decode(model, ids, threads, number(1), number(2), number(3), whole, body);
            std::printf(", \"ms\": %s, \"body_ms\": %s", list(whole).c_str(), list(body).c_str());
        }
        std::printf("}\n");
        std::fflush(stdout);
    }
    std::printf("{\"command\": \"end\", %s}\n", memory().c_str());
    return 0;
}

int main(int count, char ** arguments) {
    llama_backend_init();
    if (count == 5 && std::string(arguments[1]) == "quantize") {
        auto params = llama_model_quantize_default_params();
        params.ftype = LLAMA_FTYPE_MOSTLY_Q4_0;
        params.allow_requantize = true;
        params.nthread = std::atoi(arguments[4]);
        return llama_model_quantize(arguments[2], arguments[3], &params) == 0 ? 0 : 1;
    }
    require(count >= 6 && std::string(arguments[1]) == "run", "see the first lines of client.cpp");
    return run(arguments + 2, count - 2);
}
