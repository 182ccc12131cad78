"""Operations worth fusing, each with its plain torch reference."""

from kernels.head_loss import head_loss
from kernels.linear_kl import kl, linear_kl
from kernels.linear_logprob import all_logprobs, linear_logprob, logprob

__all__ = ["all_logprobs", "head_loss", "kl", "linear_kl", "linear_logprob", "logprob"]
