"""llama.cpp's own converter for a random model: no vocabulary, all else as it is.

python convert.py LLAMA_CPP MODEL OUT.gguf        Q8_0
python convert.py LLAMA_CPP --bytes FILE.gguf     bytes that the layers and the head of one token read, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any


def bytes_read(path: str) -> dict[str, float]:
    """Bytes of the weights that one token uses: of experts the chosen ones, of the embedding nothing."""
    import gguf

    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    value: Any = lambda name: reader.fields[f"{architecture}.{name}"].contents()  # noqa: E731
    share = value("expert_used_count") / value("expert_count")
    sizes = {tensor.name: float(tensor.n_bytes) for tensor in reader.tensors}
    head = sizes.pop("output.weight")
    del sizes["token_embd.weight"]
    return {"head": head, "layers": sum(size * (share if "_exps" in name else 1) for name, size in sizes.items())}


def main() -> None:
    source, *rest = sys.argv[1:]
    sys.path[:0] = [source, f"{source}/gguf-py"]
    if rest[0] == "--bytes":
        print(json.dumps(bytes_read(rest[1])))
        return
    import convert_hf_to_gguf
    from conversion.glm import Glm5NextModel, GlmMoeDsaModel

    GlmMoeDsaModel.set_vocab = Glm5NextModel.set_vocab = GlmMoeDsaModel._set_vocab_none
    sys.argv = ["convert_hf_to_gguf.py", rest[0], "--outfile", rest[1], "--outtype", "q8_0"]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
