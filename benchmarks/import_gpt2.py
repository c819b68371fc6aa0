"""GPT-2 of 124 M random weights through `perspectron import`, plain and with lenses at rest: the largest difference of
its logits from transformers'.

python -m benchmarks.import_gpt2
"""

import tempfile
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, logging

from perspectron import foreign


def main() -> None:
    logging.disable_progress_bar()
    torch.manual_seed(1)
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    ids = torch.randint(1, 50256, (1, 64))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        theirs.save_pretrained(folder)
        inner = ByteLevelBPETokenizer()
        inner.train_from_iterator(["the quick brown fox"] * 9, vocab_size=300, show_progress=False)
        inner.add_special_tokens(["<|endoftext|>"])
        inner.save(f"{folder}/tokenizer.json")
        at, expected = inner.token_to_id("<|endoftext|>"), theirs(ids).logits
        expected[..., [0, at]] = expected[..., [at, 0]]
        swapped = torch.where(ids == at, 0, ids)
        for lens in (False, True):
            model, _ = foreign.read(Path(folder), lens=lens)
            away = float((model(swapped).logits - expected).abs().max())
            size = sum(parameter.numel() for parameter in model.parameters())
            most = float(expected.abs().max())
            print(
                f"{model.config.name}: {size / 1e6:.1f} M, logits differ by {away:.1e} at most, of {most:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
