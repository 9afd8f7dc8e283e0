"""Muon (Jordan et al. 2024): steps whose singular values are all near one."""

import torch


class MuonAdamW(torch.optim.AdamW):
    """Muon for the first group, the matrices of the layers, and AdamW for the others, at the same learning rate."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._step_supports_amp_scaling = False  # in float16, GradScaler then skips whole steps, not only AdamW's part

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for p in group["params"]:
            if p.grad is not None:
                if not self.state[p]:
                    self.state[p] |= {"momentum": torch.zeros_like(p), "step": torch.zeros(())}  # AdamW reads "step"
                momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
                update = orthogonalize(p.grad.lerp(momentum, 0.95))  # Nesterov's: one step ahead
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)  # as large as AdamW's updates
                p.grad = None  # so that AdamW leaves it alone
        super().step()


def orthogonalize(x):
    """Return x with all singular values near 1, by five Newton-Schulz steps x <- a x + (b xxᵀ + c (xxᵀ)²) x."""
    a, b, c = 3.4445, -4.7750, 2.0315
    if x.size(0) > x.size(1):  # then xᵀx is smaller than xxᵀ
        return orthogonalize(x.T).T
    x = x / x.norm().clamp(min=1e-7)  # no singular value may exceed 1
    for _ in range(5):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x
