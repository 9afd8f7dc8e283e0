"""The model once more, written to be read: float64, explicit T x T matrices and causal mask, Python loops.

It shares no code with model.py and none of its tricks (score vectors, fused attention, caches), so that the two can be
held against each other. It works on a plain dict of tensors, `state`, under model.py's names: embed.weight, ...

Shapes: T positions, C = n_embd, d = head_dim. There is no batch axis: one row at a time.
"""

import math

import torch

# -- between a model and its plain dict of tensors -----------------------------------------------------------


def get_state(model):
    """A model's parameters as float64 leaf tensors: gradients reach them, and only them."""
    return {name: p.detach().double().clone().requires_grad_() for name, p in model.named_parameters()}


def reference_logits(model, idx):
    """Float64 logits (B, T, V) of the tokens idx (B, T) under the model's present parameters."""
    return logits_of(model.config, get_state(model), idx)


# -- the parts every Llama has -------------------------------------------------------------------------------


def linear(state, name, x):
    """x Wᵀ + b, where there is a b."""
    y = x @ state[name + ".weight"].T
    return y + state[name + ".bias"] if name + ".bias" in state else y


def rms_norm(x, weight, eps):
    """x / √(mean(x²) + ε) · weight"""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rope(x, theta):
    """Rotate the pairs (x_j, x_{j + d/2}) of the vector x_t of x (T, d) by the angle t · θ^(-2j/d)."""
    T, d = x.shape
    rows = []
    for t in range(T):
        angle = t * theta ** (-2 * torch.arange(d // 2, dtype=torch.float64) / d)
        first, second = x[t, : d // 2], x[t, d // 2 :]
        rows.append(torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]))
    return torch.stack(rows)


def swiglu(state, layer, x):
    """W_down( silu(W_gate x) · W_up x )"""
    name = f"blocks.{layer}.mlp."
    gate = linear(state, name + "gate_proj", x)
    return linear(state, name + "down_proj", gate * torch.sigmoid(gate) * linear(state, name + "up_proj", x))


def causal_softmax(scores):
    """The softmax of each row, over the positions up to the row's own."""
    T = scores.shape[0]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)


# -- scores: for each query head a T x T matrix --------------------------------------------------------------


def w2_scores(mu_q, mu_k, sigma_q, sigma_k, log_tau):
    """S: "S_{m,n} = −( D_μ²(m,n) + D_σ² ) / τ. D_μ² is the squared Euclidean distance of the means after RoPE; D_σ² is
    the squared Euclidean distance of the standard deviations."  "scores divided by τ + ε"; τ = exp(log_tau), ε = 1e-6.
    """
    T = mu_q.shape[0]
    rows = []
    for m in range(T):
        d_mu = ((mu_q[m] - mu_k) ** 2).sum(dim=-1)
        d_sigma = ((sigma_q[m] - sigma_k) ** 2).sum(dim=-1)
        rows.append(-(d_mu + d_sigma) / (torch.exp(log_tau) + 1e-6))
    return torch.stack(rows)


def overlap_scores(mu_q, mu_k, sigma_q, sigma_k):
    """S: "−½ ( ‖Rμ_q − Rμ_k‖² / (σ_q + σ_k) + D · log(σ_q + σ_k) )", with one σ per head and token, (T,)"""
    T, D = mu_q.shape
    rows = []
    for m in range(T):
        spread = sigma_q[m] + sigma_k
        rows.append(-(((mu_q[m] - mu_k) ** 2).sum(dim=-1) / spread + D * torch.log(spread)) / 2)
    return torch.stack(rows)


# The T x T attention weights of a head, by the kind of attention. q, k (T, d): the head's, rotated; unrotated: the two
# before that; qk: its QKᵀ of all layers up to this one; h, kv: the query head and the key head that it reads;
# normed: the layer's input; extras: its own parameters.


def weights_standard(q, k, **_):
    """softmax(QKᵀ / √d_k)"""
    return causal_softmax(q @ k.T / q.shape[-1] ** 0.5)


def weights_w2(q, k, h, kv, normed, extras, config, **_):
    overlap = config.attention == "w2_overlap"
    T, d = q.shape
    form = "diagonal" if overlap else config.sigma
    n = {"scalar": 1, "diagonal": d, "none": 0}[form]
    sigmas = []
    for name, head in (("sigma_q", h), ("sigma_k", kv)):
        rows = extras[name + ".weight"][head * n : (head + 1) * n] if n else torch.zeros(0, normed.shape[1]).double()
        sigmas.append(torch.log1p(torch.exp(normed @ rows.T)))  # Softplus
    if overlap:  # "σ = mean over D of softplus(...) + 1e-4"
        return causal_softmax(overlap_scores(q, k, *(sigma.mean(dim=-1) + 1e-4 for sigma in sigmas)))
    if form == "scalar":  # "one number for the D entries of the vector σ"
        sigmas = [sigma.expand(T, d) for sigma in sigmas]
    log_tau = math.log(2 * d**0.5) + 0.1 * extras["tau_shift"][h]  # q·k starts with 1/√d
    return causal_softmax(w2_scores(q, k, *sigmas, log_tau))


def weights_summed(q, qk, extras, config, **_):
    """Σ_i QK_iᵀ / d_s over the layers i < m. In 5.5 "d_s is a learned vector √d_k · a⃗"; a_i = exp(log_a_i)."""
    d, m, scores = q.shape[-1], len(qk), 0
    for i in range(m):
        a_i = torch.exp(extras["log_a"][i]) if "log_a" in extras else None
        match config.qk_scale:
            case "5.1":
                d_s = d**0.5
            case "5.2":
                d_s = d**0.5 * m**0.5
            case "5.3":
                d_s = d**0.5 * m
            case "5.4":
                d_s = d ** extras["a"][0] * m ** extras["b"][0]
            case "5.5":
                d_s = a_i * d**0.5
            case "5.6":
                d_s = a_i * d ** extras["b"][i]
            case "5.7":
                d_s = a_i
        scores = scores + qk[i] / d_s
    return causal_softmax(scores)


WEIGHTS = {"standard": weights_standard, "w2": weights_w2, "w2_overlap": weights_w2, "summed_qk": weights_summed}

T_BY_T = [{"attention": "w2_overlap"}]  # settings under which T x T tensors are made: a test allows them


def attention_weights(config, state, layer, normed, qk):
    """The T x T attention weights of each query head of a layer, from the layer's normed input.

    qk: the list of the earlier layers' QKᵀ, one per head; this layer's is appended to it. Method 5: "attention becomes
    softmax( Σ QKᵀ / d_s ), the sum running over this layer's QKᵀ and those of all earlier layers".
    """
    name = f"blocks.{layer}.attn."
    extras = {key.removeprefix(name): value for key, value in state.items() if key.startswith(name)}
    n_head, n_kv_head = config.n_head, config.n_kv_head or config.n_head
    d = config.n_embd // n_head
    assert config.attention in WEIGHTS, f"add the formula of attention = {config.attention!r} to WEIGHTS"
    queries = linear(state, name + "q_proj", normed)
    keys = linear(state, name + "k_proj", normed)

    qk.append([])
    weights_of_head, common = WEIGHTS[config.attention], dict(normed=normed, extras=extras, config=config)
    weights = []
    for h in range(n_head):
        kv = h // (n_head // n_kv_head)  # the key head that this query head reads
        unrotated = queries[:, h * d : (h + 1) * d], keys[:, kv * d : (kv + 1) * d]
        q, k = (rope(x, config.rope_theta) for x in unrotated)
        qk[layer].append(q @ k.T)
        weights.append(
            weights_of_head(q=q, k=k, unrotated=unrotated, qk=[of_layer[h] for of_layer in qk], h=h, kv=kv, **common)
        )
    return weights


# -- a layer's two outputs on any input, with the attention weights of its first run kept --------------------


def attention_output(config, state, i, weights, x):
    """attn_i(x): "X → input norm of layer i → attention with the kept weights, W^V, W^O → that output, without a
    residual." """
    name = f"blocks.{i}."
    n_head, n_kv_head = config.n_head, config.n_kv_head or config.n_head
    d = config.n_embd // n_head
    normed = rms_norm(x, state[name + "attn_norm.weight"], config.norm_eps)
    values = linear(state, name + "attn.v_proj", normed)
    heads = []
    for head in range(n_head):
        kv = head // (n_head // n_kv_head)
        heads.append(weights[head] @ values[:, kv * d : (kv + 1) * d])
    return linear(state, name + "attn.o_proj", torch.cat(heads, dim=-1))


def mlp_output(config, state, i, h):
    """mlp_i(h): "post-attention norm of layer i → MLP of layer i → that output, without a residual." """
    norm = state[f"blocks.{i}.mlp_norm.weight"]
    return swiglu(state, i, rms_norm(h, norm, config.norm_eps))


# -- the residual methods at layer l >= 1. attn(i, x) and mlp(i, h) rerun layer i, w has weights of layers 0..l --------


def standard_block(l, x, attn, mlp, w=None, keep_input=None):
    """h = x + attn_l(x);  x' = h + mlp_l(h)"""
    h = x + attn(l, x)
    return h + mlp(l, h)


def methods_1_and_3(l, x, attn, mlp, w, keep_input):
    """x' = Σ_{i≤l} w_i · mlp_i(x + attn_i(x))  [+ h]: "The attention residual is as in the original model. The MLP
    residual becomes the sum of the earlier layers' recomputed MLP outputs." """
    h = x + attn(l, x)
    out = h if keep_input else torch.zeros_like(h)
    for w_i, i in zip(w, range(l + 1), strict=True):
        out = out + w_i * mlp(i, x + attn(i, x))
    return out


def methods_2_and_4(l, x, attn, mlp, w, keep_input):
    """h = Σ_{i≤l} w_i · attn_i(x)  [+ x]: "The MLP residual is as in the original model. The attention residual becomes
    the sum of the earlier layers' recomputed attention outputs." """
    h = x if keep_input else torch.zeros_like(x)
    for w_i, i in zip(w, range(l + 1), strict=True):
        h = h + w_i * attn(i, x)
    return h + mlp(l, h)


# the weights of m summands: "each layer's weight is 1/m (3.1) or a learned distribution (3.2)"
one = lambda m, mix: [1.0] * m
one_over_m = lambda m, mix: [1.0 / m] * m
learned_distribution = lambda m, mix: torch.softmax(mix, dim=0)

BLOCKS = {
    "standard": (standard_block, one),
    "m1": (methods_1_and_3, one),
    "m2": (methods_2_and_4, one),
    "m3.1": (methods_1_and_3, one_over_m),
    "m3.2": (methods_1_and_3, learned_distribution),
    "m4.1": (methods_2_and_4, one_over_m),
    "m4.2": (methods_2_and_4, learned_distribution),
}


# -- the whole model -----------------------------------------------------------------------------------------


def row_logits(config, state, tokens):
    """Logits (T, V) of one row of tokens."""
    block, weigh = BLOCKS[config.residual]
    qk, weights = [], []  # of each layer, kept from its first run
    x = state["embed.weight"][tokens]

    attn = lambda i, x: attention_output(config, state, i, weights[i], x)
    mlp = lambda i, h: mlp_output(config, state, i, h)
    for l in range(config.n_layer):
        normed = rms_norm(x, state[f"blocks.{l}.attn_norm.weight"], config.norm_eps)
        weights.append(attention_weights(config, state, l, normed, qk))
        if l == 0:
            x = standard_block(l, x, attn, mlp)
        else:
            x = block(l, x, attn, mlp, weigh(l + 1, state.get(f"blocks.{l}.mix")), config.keep_input)
    x = rms_norm(x, state["norm.weight"], config.norm_eps)
    head = state.get("head.weight", state["embed.weight"])
    return x @ head.T


def logits_of(config, state, idx):
    """Logits (B, T, V) of the tokens idx (B, T)."""
    return torch.stack([row_logits(config, state, row) for row in idx])


def loss_of(logits, targets):
    """The mean of −log p(target) over the targets that are not −1."""
    log_p = torch.log_softmax(logits, dim=-1)
    losses = [-log_p[b, t, targets[b, t]] for b, t in (targets != -1).nonzero()]
    return sum(losses) / len(losses)


def uncached_greedy(model, idx, max_new_tokens):
    """Greedy continuation of idx (B, T) by one full forward per token.

    The prompt is cropped to its last block_size tokens. When the context holds block_size tokens, its older half is
    dropped, and the newest block_size // 2 tokens are read again.
    """
    size = model.config.block_size
    window = idx[:, -size:]
    for _ in range(max_new_tokens):
        chosen = model(window)[0][:, -1].argmax(dim=-1, keepdim=True)
        idx = torch.cat([idx, chosen], dim=1)
        if window.shape[1] == size:
            window = window[:, size - size // 2 :]
        window = torch.cat([window, chosen], dim=1)
    return idx
