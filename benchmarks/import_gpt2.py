"""GPT-2 of 124 M random weights through `perspectron import`, plain and with lenses at rest: the largest difference of
its logits from transformers'.

python benchmarks/import_gpt2.py --json results/import_gpt2.json
"""

import tempfile
from pathlib import Path

import common
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, logging

from perspectron.interop import foreign

TESTS = ("tests/interop/test_foreign.py", "-k", "logits or lenses")
SMALL = {"n_embd": 64, "n_layer": 2, "n_head": 2}


def main() -> None:
    args = common.parser(__doc__ or "", threads=1, repeats=1).parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    torch.manual_seed(1)
    theirs = GPT2LMHeadModel(GPT2Config(**SMALL if args.quick else {})).eval()
    report = common.Report(args, TESTS, dtype="float32", shapes="one row of 64 tokens")
    ids, found = torch.randint(1, 50256, (1, 64)), {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        inner = ByteLevelBPETokenizer()
        inner.train_from_iterator(["the quick brown fox"] * 9, vocab_size=300, show_progress=False)
        inner.add_special_tokens(["<|endoftext|>"])
        inner.save(f"{folder}/tokenizer.json")
        at, expected = inner.token_to_id("<|endoftext|>"), theirs(ids).logits
        for config in (theirs.config, theirs.generation_config):  # the ends that this tokenizer has
            config.bos_token_id = config.eos_token_id = at
        theirs.save_pretrained(folder)
        for lens in (False, True):
            model, *_ = foreign.read(Path(folder), lens=lens)
            found[model.config.name] = {
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "largest_difference": float((model(ids).logits - expected).abs().max()),
                "largest_logit": float(expected.abs().max()),
            }
    report.table(
        ["model", "parameters", "largest difference of a logit", "largest logit"],
        [[name, *(f"{value:.4g}" for value in values.values())] for name, values in found.items()],
    )
    report.finish(found)


if __name__ == "__main__":
    main()
