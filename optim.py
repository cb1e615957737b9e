"""AdamW with its moments in bfloat16: 4 bytes of state per parameter in place of 8. Weights and arithmetic stay fp32.

Moments are rounded up or down at random, so that they are right on average: rounded to the nearest, a second moment would
stand still, for a step changes it by 0.1 % and neighbours in bfloat16 are 0.4 to 0.8 % apart (stochastic rounding as in
arXiv 2010.06192, there for weights). Left out: foreach and fused kernels, amsgrad, sparse gradients.
"""

import math

import torch
from torch import Tensor

PIECE = 2**22  # numbers that are computed at once: what a step needs beside its state does not grow with the model


def noise(first: int, n: int, seed: int, device: torch.device) -> Tensor:
    """64 random bits (n,) for the numbers first, first + 1, ... of a parameter: the splitmix64 hash of their places, so they
    are the same on any device and any number of ranks."""
    x = torch.arange(first, first + n, device=device).mul_(-7046029254386353131).add_(seed)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_(x.bitwise_right_shift(31).bitwise_and_(2**33 - 1))


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 -> bfloat16, up with the probability of the part cut off; bits: 16 random ones each."""
    return x.view(torch.int32).add(bits.to(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


def local(x: Tensor) -> Tensor:
    """This rank's part, flat."""
    return (x.to_local() if hasattr(x, "to_local") else x).detach().reshape(-1)


class AdamW(torch.optim.Optimizer):
    """As torch.optim.AdamW; state of a parameter: step, exp_avg, exp_avg_sq. What is drawn at random is a function of (seed,
    parameter, step, place), so runs repeat and a resumed one goes on exactly."""

    def __init__(self, params, lr: float, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, seed=0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.seed = seed

    @torch.no_grad()
    def step(self, closure=None) -> None:
        each = ((group, p) for group in self.param_groups for p in group["params"])
        for number, (group, p) in enumerate(each):
            if p.grad is None:
                continue
            s = self.state[p]
            if not s:
                s["step"] = torch.tensor(0.0)
                s["exp_avg"], s["exp_avg_sq"] = (torch.zeros_like(p, dtype=torch.bfloat16) for _ in range(2))
            s["step"] += 1
            step, first = int(s["step"]), 0
            seed = ((((self.seed << 16) + number) << 24) + step) % 2**63
            if hasattr(p, "device_mesh"):  # FSDP2 gives every rank as many rows, the last ones fewer
                rows = math.ceil(p.shape[0] / p.device_mesh.size())
                first = p.device_mesh.get_local_rank() * rows * math.prod(p.shape[1:])
            parts = [x.split(PIECE) for x in map(local, (p, p.grad, s["exp_avg"], s["exp_avg_sq"]))]
            for i, piece in enumerate(zip(*parts)):
                self.update(*piece, step, noise(first + i * PIECE, len(piece[0]), seed, p.device), **group)

    def update(
        self, w: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, bits: Tensor, lr, betas, eps, weight_decay, **_
    ) -> None:
        """One piece (n,) of a parameter in place: weights fp32, moments bfloat16."""
        new_m = m.float().lerp_(grad, 1 - betas[0])
        new_v = v.float().mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        m.copy_(rounded(new_m, bits & 0xFFFF))
        v.copy_(rounded(new_v, bits >> 16 & 0xFFFF))
        scale = new_v.div_(1 - betas[1] ** step).sqrt_().add_(eps)
        w.mul_(1 - lr * weight_decay).addcdiv_(new_m, scale, value=-lr / (1 - betas[0] ** step))

    def load_state_dict(self, state: dict) -> None:
        """torch widens a state to the type of its parameter: take that back, without loss."""
        super().load_state_dict(state)
        for s in self.state.values():
            s |= {k: s[k].bfloat16() for k in ("exp_avg", "exp_avg_sq")}
