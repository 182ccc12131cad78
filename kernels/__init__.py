"""Operations worth fusing, each with its plain torch reference."""

from kernels.linear_logprob import linear_logprob

__all__ = ["linear_logprob"]
