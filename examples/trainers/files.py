"""The small GPT-2 and its sentences as files, for tools that read what they train from a folder."""

import json
from pathlib import Path

from texts import WORDS, Sentences, model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write(folder: Path) -> Path:
    """Write ``model``, with its tokenizer, and ``sentences.json``; return the folder."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, "0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict.fromkeys(("pad_token", "bos_token", "eos_token", "unk_token"), "0")
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder / "model")
    model().save_pretrained(folder / "model")
    texts = [" ".join(map(str, sentence["input_ids"][:48].tolist())) for sentence in Sentences()]
    rows = [{"instruction": text[:20], "input": "", "output": text, "text": text} for text in texts]
    (folder / "sentences.json").write_text(json.dumps(rows), encoding="utf-8")
    return folder


def print_losses(folder: Path) -> None:
    """Print each loss that a trainer has written to its history."""
    states = sorted(folder.glob("**/trainer_state.json"))
    for entry in json.loads(states[-1].read_text(encoding="utf-8"))["log_history"]:
        if "loss" in entry:
            print(f"loss {entry['loss']:.6f}")
