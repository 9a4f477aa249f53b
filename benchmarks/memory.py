"""Memory of runs, predicted by `headrace plan` and measured: weights, KV and peak resident memory.

    python benchmarks/memory.py            # table in Markdown, about two minutes
    python benchmarks/memory.py --only mla

Each case is a random model of about 100 million parameters in a new process, which loads it and
runs requests. Needs torch and transformers.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

VOCAB = 16_384
SIZE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
}
EXPERTS = {"num_local_experts": 8, "intermediate_size": 512}
LATENT = {
    "num_key_value_heads": 12,
    "kv_lora_rank": 256,
    "q_lora_rank": 384,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


class Shape(NamedTuple):
    """A class of transformers, and its sizes."""

    model: str
    sizes: dict[str, Any]


SHAPES = {
    "dense": Shape("LlamaForCausalLM", SIZE),
    "experts": Shape("MixtralForCausalLM", SIZE | EXPERTS),
    "mla": Shape("DeepseekV2ForCausalLM", SIZE | LATENT),
    "windows": Shape("Gemma2ForCausalLM", SIZE | {"head_dim": 64, "sliding_window": 512}),
}


class Case(NamedTuple):
    """A model in a format of `headrace convert`, and the requests of its run."""

    shape: str
    format: str
    prompt: int
    output: int
    batch: int
    adapter: bool = False


CASES = [
    Case("dense", "bf16", 1000, 24, 8),
    Case("dense", "Q4_0", 1000, 24, 8),
    Case("dense", "int4-g64", 500, 12, 16),
    Case("dense", "bf16", 1000, 24, 8, adapter=True),
    Case("experts", "bf16", 1000, 24, 8),
    Case("experts", "Q4_K_M", 2000, 48, 4),
    Case("mla", "bf16", 1000, 24, 4),
    Case("mla", "Q8_0", 500, 12, 8),
    Case("windows", "bf16", 2000, 48, 4),
    Case("windows", "int4-g64", 1000, 24, 8),
]

RUN = """
import json, sys
from headrace import LLM, SamplingParams
from headrace.planner.host import peak_memory
model, adapter, prompt, output, batch = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
llm = LLM(model, max_model_len=prompt + output)
if adapter:
    llm.load_adapter("a", adapter)
prompts = [
    {"prompt_token_ids": [(i * 7 + j * 13) % 1000 + 100 for j in range(prompt)]}
    for i in range(batch)
]
loaded = peak_memory()
llm.generate(
    prompts,
    SamplingParams(max_tokens=output, ignore_eos=True),
    adapter="a" if adapter else None,
)
print(json.dumps({"loaded": loaded, "peak": peak_memory()}))
"""


def write_model(shape: Shape, folder: Path) -> None:
    """Write a random model in bf16 with a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, shape.model)
    with torch.device("meta"):
        model = model_class(model_class.config_class(**shape.sizes, dtype="bfloat16"))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level tokenizer on the pages and sources of this repository."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    root = Path(__file__).parents[1]
    texts = [
        *root.glob("docs/**/*.md"),
        *root.glob("headrace/**/*.py"),
        *root.glob("tests/**/*.py"),
    ]
    tokenizer.train([str(text) for text in sorted(texts)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_adapter(folder: Path, rank: int = 64) -> None:
    """Write a random adapter of queries and outputs of all layers."""
    import numpy as np
    from safetensors.numpy import save_file

    rng, dim = np.random.default_rng(0), SIZE["hidden_size"]
    save_file(
        {
            f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_{half}.weight": (
                0.01 * rng.standard_normal(shape, np.float32)
            )
            for layer in range(SIZE["num_hidden_layers"])
            for part in "qo"
            for half, shape in (("A", (rank, dim)), ("B", (dim, rank)))
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def convert(source: Path, format: str, folder: Path) -> Path:
    if format == "bf16":
        return source
    target = folder / f"{source.name}-{format}{'.gguf' if format.startswith('Q') else ''}"
    if not target.exists():
        command = ["headrace", "convert", str(source), str(target), "--to", format]
        subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    return target


def main() -> None:
    from headrace.checkpoint.adapter import read_adapter
    from headrace.measure.placed_model import open_model, stage_programs
    from headrace.measure.run_memory import run_memory, this_process
    from headrace.parallel.mesh import Mesh
    from headrace.planner.host import available_memory

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SHAPES, help="shape of the only cases to run")
    only = parser.parse_args().only
    print("| model | requests | weights | KV | activations | peak, predicted | measured | error |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with TemporaryDirectory() as name:
        root = Path(name)
        (root / "adapter").mkdir()
        write_adapter(root / "adapter")
        for case in CASES:
            if only and case.shape != only:
                continue
            source = root / case.shape
            if not source.exists():
                write_model(SHAPES[case.shape], source)
            model = convert(source, case.format, root)
            checkpoint = open_model(str(model))
            adapter = root / "adapter" if case.adapter else None
            expected = run_memory(
                checkpoint,
                stage_programs(checkpoint, "cpu", Mesh())[0],
                this_process(),
                kv_dtype="bf16",
                prompt=case.prompt,
                output=case.output,
                batch=case.batch,
                memory=available_memory(),
                max_model_len=case.prompt + case.output,
                adapter=read_adapter(adapter, checkpoint.spec) if adapter else None,
            )
            sizes = map(str, (case.prompt, case.output, case.batch))
            run = subprocess.run(
                [sys.executable, "-c", RUN, str(model), str(adapter or ""), *sizes],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            found = json.loads(run.stdout)
            title = f"{case.shape}, {case.format}{', LoRA' if case.adapter else ''}"
            figures = (expected.weights, expected.kv, expected.activations, expected.peak)
            cells = [f"{value / 1e6:.1f}" for value in (*figures, found["peak"])]
            requests = f"{case.batch} of {case.prompt} + {case.output}"
            error = expected.peak / found["peak"] - 1
            print(f"| {title} | {requests} | {' | '.join(cells)} | {error:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
