"""A recipe for the catalogue vllm-ascend-recipes, in English and Chinese.

The keys are those of the catalogue's docs/recipe-schema.md and src/lib/schema.ts (2026-08-21): a recipe needs
both languages in the same structure. The scenarios contain the scripts of `--to shell`.
"""

from __future__ import annotations

from typing import Any

from glm5_ascend.deploy.profiles.load import Profile, Role
from glm5_ascend.deploy.rendering import image, scripts
from glm5_ascend.deploy.rendering.yaml_text import dumped
from glm5_ascend.engine_lines import TRIED_ON, VLLM
from glm5_ascend.errors import ConfigError

MACHINES = {"a2": "Atlas 800T A2", "a3": "Atlas 800T A3"}
#: Language -> key -> text.
TEXTS = {
    "en": {
        "description": "{model}, {precision} experts, {machine}: {title}. Weights quantized on a CPU by glm5-ascend.",
        "overview": "{title}. Source of the settings: {source}. Status: {status}.",
        "quantize": "Quantize the bf16 or FP8 weights on any CPU, in bounded memory, and check the result:",
        "weights": "Download the source weights and quantize them",
        "container": "Build an image with the package (no version of the image changes) and start it:",
        "prepare": "Addresses",
        "addresses": "Set these variables on each machine before its script starts. NODE counts from 0.",
        "single": "The script needs no address. It asks for a key: set VLLM_API_KEY, or give --open.",
        "start": "Start {role} ({nodes} machine(s) with {dies} NPU dies each)",
        "check": "Check the service",
        "verify": "`glm5-ascend smoke` asks questions with known answers and calls a tool:",
    },
    "zh": {
        "description": "在 {machine} 上部署 {model}（专家 {precision}）：{title}。权重由 glm5-ascend 在 CPU 上量化。",
        "overview": "{title}。配置来源：{source}。状态：{status}。",
        "quantize": "在任意 CPU 上以有限内存量化 bf16 或 FP8 权重，并检查结果：",
        "weights": "下载源权重并量化",
        "container": "构建带有本工具的镜像（不改变镜像内的任何版本）并启动：",
        "prepare": "地址",
        "addresses": "启动脚本前，在每台机器上设置以下变量。NODE 从 0 开始。",
        "single": "脚本不需要地址。它要求密钥：设置 VLLM_API_KEY，或使用 --open。",
        "start": "启动 {role}（{nodes} 台机器，每台 {dies} 个 NPU die）",
        "check": "检查服务",
        "verify": "`glm5-ascend smoke` 提出已知答案的问题，并调用一个工具：",
    },
}  # fmt: skip
SIZES = {"parameter_count": "744B", "active_parameters": "40B"}


def files(profile: Profile, model: str) -> dict[str, str]:
    """File name -> YAML text. Raises ConfigError for SGLang and the CPU, which are not in the catalogue."""
    if profile.engine != VLLM or profile.platform == "cpu":
        raise ConfigError(
            f"profile {profile.name}: the recipe catalogue is of vllm-ascend",
            "use a profile of vllm-ascend, or --to shell",
        )
    return {
        f"models/{language}/THUDM/{profile.name}.yaml": dumped([recipe(profile, model, TEXTS[language])])
        for language in TEXTS
    }


def recipe(profile: Profile, model: str, texts: dict[str, str]) -> dict[str, Any]:
    """One recipe as the catalogue's reader takes it."""
    name = profile.models[-1]
    precision = profile.weights["experts"].removesuffix("_DYNAMIC")
    kinds = sorted({image.node_kind(profile, role) for role in profile.roles.values()})
    words = {
        "model": name, "precision": precision, "title": profile.title, "source": profile.source,
        "status": profile.status, "machine": ", ".join(MACHINES[kind] for kind in kinds),
    }  # fmt: skip
    return {
        "meta": {
            "title": f"{name} {precision} ({profile.name})", "slug": profile.name, "provider": "THUDM",
            "description": texts["description"].format(**words),
            "date_added": TRIED_ON,  # of the versions below; today's date would change the file from day to day
            "difficulty": "advanced", "tasks": ["text"],
            # The catalogue writes `verified` after its own run.
            "hardware": {f"atlas_800_{kind}": "experimental" for kind in kinds},
        },
        "model": {
            "model_id": f"zai-org/{name}", "min_vllm_version": profile.line.tested[0], "architecture": "moe", **SIZES,
            "context_length": max(int(role.args["max-model-len"]) for role in profile.roles.values()),
            "modality": "text",
        },
        "guide": "",
        "overview": texts["overview"].format(**words),
        "weight_download": [weights(profile, name, precision, model)],
        "quantization": {"content": f"{texts['quantize']}\n\n{fenced(quantize_commands(profile, name, model))}"},
        "env_setup": {"container": {kind.upper(): {"content": container(profile, kind, texts)} for kind in kinds}},
        "scenarios": scenarios(profile, model, precision, texts),
        "verification": f"{texts['verify']}\n\n{fenced(smoke(profile))}",
        "references": [
            {"title": "vLLM Ascend", "url": "https://docs.vllm.ai/projects/ascend"},
            {"title": f"zai-org/{name}", "url": f"https://huggingface.co/zai-org/{name}"},
        ],
    }  # fmt: skip


def smoke(profile: Profile) -> str:
    port = profile.proxy.get("port") or next(iter(profile.roles.values())).port
    return f"glm5-ascend smoke http://127.0.0.1:{port}"


def fenced(text: str) -> str:
    return f"```bash\n{text}\n```"


def quantize_commands(profile: Profile, name: str, model: str) -> str:
    return "\n".join(
        [
            "pip install glm5_ascend-*.whl    # `make build` in a clone",
            f"glm5-ascend quantize {name} {model} --recipe {profile.weights['recipe']}",
            f"glm5-ascend verify {model}",
        ]
    )


def weights(profile: Profile, name: str, precision: str, model: str) -> dict[str, Any]:
    commands = f"pip install modelscope\nmodelscope download --model ZhipuAI/{name} --local_dir {name}\n"
    commands += quantize_commands(profile, name, model)
    source = {
        "source": "ModelScope",
        "url": f"https://www.modelscope.cn/models/ZhipuAI/{name}",
        "command": fenced(commands),
    }
    return {"weight_version": precision, "sources": [source]}


def container(profile: Profile, kind: str, texts: dict[str, str]) -> str:
    role = next(role for role in profile.roles.values() if image.node_kind(profile, role) == kind)
    commands = (
        f"glm5-ascend deploy render --profile {profile.name} --to compose --out {profile.name}\n"
        f"cd {profile.name} && docker compose up {role.name}    # image {profile.line.image(kind)}"
    )
    return f"{texts['container']}\n\n{fenced(commands)}"


def scenarios(profile: Profile, model: str, precision: str, texts: dict[str, str]) -> list[dict[str, Any]]:
    """One scenario for roles that work together; one for each role if they are alternatives."""
    groups = [[role] for role in profile.roles.values()] if profile.alternatives else [list(profile.roles.values())]
    return [scenario(profile, roles, model, precision, texts) for roles in groups]


def scenario(profile: Profile, roles: list[Role], model: str, precision: str, texts: dict[str, str]) -> dict[str, Any]:
    rendered = scripts.files(profile, model)
    names = [scripts.script_name(role) for role in roles]
    names += [name for name in rendered if name == "proxy.sh"]
    counts = {role.name: role.nodes for role in roles}
    pd = {"prefill", "decode"} <= set(counts)
    case = f"{counts['prefill']}p{counts['decode']}d" if pd else f"{sum(counts.values())}-node"
    several = any(role.nodes > 1 for role in roles) or len(roles) > 1
    addresses = fenced("export NODE=0 HEAD=ADDRESS_OF_NODE_0 IP=ADDRESS_OF_THIS_MACHINE VLLM_API_KEY=KEY")
    steps = [
        {"title": texts["prepare"], "content": f"{texts['addresses']}\n\n{addresses}" if several else texts["single"]}
    ]
    titles = {
        scripts.script_name(role): texts["start"].format(role=role.name, nodes=role.nodes, dies=image.dies(role))
        for role in roles
    }
    steps += [{"title": titles.get(name, name), "content": f"{{{{script:{key(name)}}}}}"} for name in names]
    steps.append({"title": texts["check"], "content": "{{script:service-check}}"})
    return {
        "test_id": "-".join([profile.name, roles[0].name]) if profile.alternatives else profile.name,
        "npu": MACHINES[image.node_kind(profile, roles[0])],
        "precision": precision,
        "deployment": "pd" if pd else "non-pd",
        "case": case,
        "npu_per_node": max(image.dies(role) for role in roles),
        "scripts": {key(name): {"language": "bash", "content": rendered[name]} for name in names}
        | {"service-check": {"language": "bash", "content": smoke(profile)}},
        "steps": steps,
    }


def key(name: str) -> str:
    """Name of a script in the catalogue, which takes no extension."""
    return name.removesuffix(".sh")
