"""What works in transformers, of models with a state: ours, transformers' own Mamba-2, and those of fla if it is
installed. Each row is one thing that people do; "ok", or the first line of what it said.

python benchmarks/in_transformers.py --json results/in_transformers.json
"""

import functools
import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import common
import torch
import transformers

VOCAB, N = 128, 6


def ours() -> Any:
    """perspective2, small."""
    from perspectron import presets
    from perspectron.interop.hf import PerspectronConfig, PerspectronForCausalLM

    config = presets.get("perspective2", vocab_size=VOCAB, d_model=32, hidden=32, layers=3, window=8)
    return PerspectronForCausalLM(PerspectronConfig.of(config))


def mamba2() -> Any:
    """transformers' Mamba-2, in its own torch code."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(
        Mamba2Config(vocab_size=VOCAB, hidden_size=32, num_heads=8, head_dim=8, state_size=8, num_hidden_layers=2,
                     n_groups=1, chunk_size=8, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    )  # fmt: skip


def fla() -> Any:
    """fla's gated DeltaNet."""
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    return GatedDeltaNetForCausalLM(
        GatedDeltaNetConfig(vocab_size=VOCAB, hidden_size=32, num_heads=2, head_dim=16, num_hidden_layers=2)
    )


def mamba_ssm() -> Any:
    """Mamba-2 of its authors."""
    from mamba_ssm.models.config_mamba import MambaConfig
    from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

    return MambaLMHeadModel(MambaConfig(d_model=32, n_layer=2, vocab_size=VOCAB, ssm_cfg={"layer": "Mamba2"}))


def greedy(model: Any, ids: Any = None, **options: Any) -> list[list[int]]:
    ids = torch.arange(1, 8)[None] if ids is None else ids
    options = {"do_sample": False, "max_new_tokens": N, "eos_token_id": None, "pad_token_id": 0} | options
    return model.generate(ids, **options)[:, ids.shape[1] :].tolist()


def same(a: Any, b: Any) -> None:
    if a != b:
        raise ValueError("other tokens than without it")


def beams(model: Any) -> None:
    same(greedy(model, num_beams=4), greedy(model, num_beams=4, use_cache=False))


def padding(model: Any) -> None:
    ids = torch.arange(1, 8)[None]
    padded, mask = (
        torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1),
        torch.ones(1, 10, dtype=torch.int64),
    )
    mask[:, :3] = 0
    same(greedy(model, padded, attention_mask=mask), greedy(model, ids))


def crop(model: Any) -> None:
    same(greedy(model, prompt_lookup_num_tokens=3), greedy(model))


def assisted(model: Any) -> None:
    same(greedy(model, assistant_model=model), greedy(model))


def embeds(model: Any) -> None:
    ids = torch.arange(1, 8)[None]
    out = model.generate(inputs_embeds=model.get_input_embeddings()(ids), do_sample=False, max_new_tokens=N,
                         eos_token_id=None, pad_token_id=0)  # fmt: skip
    same(out.tolist(), greedy(model, ids))


def save_and_load(model: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        same(greedy(type(model).from_pretrained(folder).eval()), greedy(model))


def trainer(model: Any) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    row = {"input_ids": torch.arange(1, 13), "labels": torch.arange(1, 13)}
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(folder, max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
                                    gradient_checkpointing=True, log_level="error")  # fmt: skip
        for start in (None, f"{folder}/checkpoint-1"):
            made = Trainer(model=model, args=options, train_dataset=[row] * 16)
            made.remove_callback(PrinterCallback)
            made.train(resume_from_checkpoint=start)


ROWS: dict[str, Callable[[Any], None]] = {
    "greedy with the cache = without": lambda model: same(greedy(model), greedy(model, use_cache=False)),
    "4 beams with the cache = without": beams,
    "left padding = alone": padding,
    "prompt lookup (cache crop) = greedy": crop,
    "assisted decoding = greedy": assisted,
    "inputs_embeds = ids": embeds,
    "save and load": save_and_load,
    "Trainer, checkpointing, resume": trainer,
}
MODELS = {
    "perspectron": (ours, "perspectron"),
    "mamba2 of transformers": (mamba2, "transformers"),
    "fla": (fla, "fla"),
    "mamba_ssm": (mamba_ssm, "mamba_ssm"),
}
"""Each with the package that it needs."""
TESTS = ("tests/hf/test_contract.py",)


def said(row: Callable[[], Any]) -> str:
    try:
        row()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
    return "ok"


def built(make: Callable[[], Any], package: str) -> Any:
    """A model in inference, whose logits prefer some tokens to others; where there is none, why, in words."""
    if importlib.util.find_spec(package) is None:
        return "not installed"
    torch.manual_seed(1)
    try:
        model = make().eval()
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(8)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"
    return model


def main() -> None:
    args = common.parser(__doc__ or "", threads=1, repeats=1).parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    report = common.Report(args, TESTS, dtype="float32", shapes="2 or 3 layers, 32 wide")
    made = {name: built(make, package) for name, (make, package) in MODELS.items()}
    rows = {"import and build": {name: m if isinstance(m, str) else "ok" for name, m in made.items()}}
    for title, row in ROWS.items():
        there = {name: m for name, m in made.items() if not isinstance(m, str)}
        rows[title] = {name: said(functools.partial(row, m.eval())) for name, m in there.items()}
    report.say(f"| on a CPU | {' | '.join(MODELS)} |", "|---" * (len(MODELS) + 1) + "|")
    report.say(
        *(
            f"| {title} | {' | '.join(cells.get(name, '') for name in MODELS)} |"
            for title, cells in rows.items()
        )
    )
    report.finish({"transformers": transformers.__version__, "rows": rows})


if __name__ == "__main__":
    main()
