"""Muon, which orthogonalizes in bfloat16, for devices on which that is slow."""

import torch

from config.runtime.devices import pick_dtype


def make_muon(matrices, learning_rate, weight_decay, device):
    """Return torch.optim.Muon where `device` multiplies bfloat16 fast, else the same in float32."""
    kind = torch.optim.Muon if pick_dtype("auto", device) == torch.bfloat16 else Float32Muon
    # adjust_lr_fn gives Muon's updates the size of AdamW's, so one learning rate serves both
    return kind(matrices, learning_rate, weight_decay, adjust_lr_fn="match_rms_adamw")


class Float32Muon(torch.optim.Muon):
    """torch.optim.Muon in float32. Groups and state are the same, so a run may move to another machine."""

    @torch.no_grad()
    def step(self, closure=None):
        """Update all matrices. As with PyTorch's, a matrix that FSDP has sharded is gathered where it is multiplied."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = self.state[p]["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])  # Nesterov's: one step ahead
                update = orthogonalize(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def orthogonalize(x, coefficients, steps, eps):
    """Return x with all singular values near 1, by Newton-Schulz steps x <- a x + (b xxᵀ + c (xxᵀ)²) x."""
    a, b, c = coefficients
    if x.size(0) > x.size(1):  # then xᵀx is smaller than xxᵀ
        return orthogonalize(x.T, coefficients, steps, eps).T
    x = x / x.norm().clamp(min=eps)  # no singular value may exceed 1
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x
