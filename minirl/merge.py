"""python -m minirl.merge ADAPTER FOLDER: a LoRA adapter and its base as one plain model folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from minirl.adapters import base_of, export_merged, is_adapter, load_adapter, tokenizer_folder
from minirl.checkpoint import load_model
from minirl.config import UserError, run
from minirl.nf4 import quantize_base
from minirl.tokenizer import load_tokenizer


@dataclass(frozen=True)
class MergeConfig:
    adapter: str  # folder of the adapter: step_N of a run, or what PEFT saved
    out: str  # folder of the merged model, a new one
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"  # of its weights; auto: the base's
    qlora: bool = False  # the adapter was trained with --qlora: merge with the base as it was then, rounded to 4 bits


def main(config: MergeConfig) -> None:
    """Merge an adapter with the base that it names: summed in float32 or wider, and rounded once."""
    out = Path(config.out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} is there already: name a new folder for the merged model")
    if not is_adapter(config.adapter):
        raise UserError(f"{config.adapter} holds no adapter_config.json: give step_N of a LoRA run, or a folder that "
                        "PEFT saved")
    tokenizer = load_tokenizer(tokenizer_folder(config.adapter))
    model = load_model(base_of(config.adapter), None)
    own = model.embed_tokens.weight.dtype
    dtype = own if config.dtype == "auto" else getattr(torch, config.dtype)
    model.to(torch.promote_types(torch.promote_types(own, dtype), torch.float32))
    load_adapter(quantize_base(model) if config.qlora else model, config.adapter)
    export_merged(model, out, tokenizer, dtype)
    print(f"{out}: {base_of(config.adapter)} and {config.adapter} merged, {str(dtype).removeprefix('torch.')}")


if __name__ == "__main__":
    run(main, MergeConfig, "Merge a LoRA adapter and its base into a plain model folder.\n\n"
        "    python -m minirl.merge runs/lora/step_200 merged")
