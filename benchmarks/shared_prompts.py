"""Forward and backward of rows that share their prompts, which are read once, beside the same rows read whole.

    python benchmarks/shared_prompts.py          one thread, in turns within one process

The first shape is a minibatch of `train_grpo.py` on two-digit sums, the second long prompts and answers of any length.
"""

from unittest.mock import patch

import torch
from sample import alternate, report, small_model

from minirl import prefixes
from minirl.logprobs import Output
from minirl.model import ModelConfig, Transformer
from minirl.parallel import forward_backward, init_mesh
from minirl.rollout import Rollout


def some_rows(prompts: int, answers: int, prompt: int, shortest: int, longest: int) -> Rollout:
    """So many answers of shortest to longest tokens to each prompt."""
    generator = torch.Generator().manual_seed(0)
    B, T = prompts * answers, prompt + longest
    tokens = torch.randint(256, (B, T), generator=generator)
    tokens[:, :prompt] = tokens[:prompts, :prompt].repeat_interleave(answers, 0)
    lengths = prompt + torch.randint(shortest, longest + 1, (B,), generator=generator)
    column, ids = torch.arange(1, T), torch.arange(B)
    return Rollout(tokens, (column >= prompt) & (column < lengths[:, None]), lengths, ids // answers, ids)


def main() -> None:
    torch.set_num_threads(1)
    mesh = init_mesh("cpu")
    sums = ModelConfig(258, 96, 256, 2, 4, max_position_embeddings=22)
    for name, model, rows in (
            ("128 prompts of 6 tokens x 4 answers of 4", Transformer(sums), some_rows(128, 4, 6, 4, 4)),
            ("4 prompts of 100 tokens x 8 answers of 1 to 100", small_model(), some_rows(4, 8, 100, 1, 100))):
        def update(model: Transformer = model, rows: Rollout = rows) -> None:
            def loss_fn(out: Output, mb: Rollout) -> tuple[torch.Tensor, dict]:
                return (out.logprobs * mb.action_mask).sum(), {}
            forward_backward(model, [rows], loss_fn, mesh, entropy=True)
            model.zero_grad()

        def whole(update=update) -> None:
            with patch.object(prefixes, "WORTH", -1.0):  # then sharing never pays
                update()

        print(name)
        report(alternate({"read once": update, "whole rows": whole}, 15), "read once", "whole rows")


if __name__ == "__main__":
    main()
