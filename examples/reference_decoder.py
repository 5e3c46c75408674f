"""Compute a transformer in plain Python: the decoder of the Qwen3 and Llama families, forward and backward.

All values are lists of floats, so you can follow every multiplication. The file is for reading, and the tests
use it as the oracle: they compare each value and each gradient of the torch decoder with it.

What a decoder does. Each token becomes a vector x of d numbers. Every layer adds two updates to x:

    x <- x + attention(norm(x))      collects information from earlier tokens
    x <- x + mlp(norm(x))            transforms each token by itself

Finally the vector is compared with every entry of the vocabulary. The results are the logits, and softmax
turns them into the probabilities of the next token.

How to read the backward pass. The loss L is one number. For any value y inside the model, dy stands for
dL/dy. Each operation below is a function that returns its output and its *pullback*. The pullback takes dy,
adds to the gradients of the parameters that the operation used, and returns dx, by the chain rule. A model is
a sequence of operations, and its gradient is their pullbacks in reverse order. That is all of
backpropagation.

Shapes: T tokens, d hidden size, H query heads, G key-value heads, D head size, V vocabulary. The
activations of a token are a Vector, and those of a sequence a Matrix with one row per token. Weights are
weight[out][in], as in Hugging Face checkpoints, and have their parameter names.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.rope import LinearScaling, Llama3Scaling

Vector = list[float]
Matrix = list[Vector]
Pullback = Callable[[Matrix], Matrix]
Parameters = dict[str, Any]  # name -> Matrix (projections, embeddings) or Vector (norms, biases)


class ReferenceDecoder:
    """The model: `logits` is the forward pass, `loss_and_gradients` both passes.

    Args:
        config: shape of the model.
        parameters: every parameter of `parameter_shapes(config)` as nested lists.

    Raises:
        ValueError: when the model belongs to another family or has sliding windows.
    """

    def __init__(self, config: DecoderConfig, parameters: Mapping[str, Any]) -> None:
        known = config.architecture in ("qwen3", "llama") and not config.windows
        if not known or isinstance(config.rope.scaling, LinearScaling):
            raise ValueError("the reference computes Qwen3 and Llama 3 models without sliding windows")
        self.config = config
        self.parameters = parameters
        self.gradients: Parameters = {}

    def logits(self, token_ids: Sequence[int]) -> Matrix:
        """Logits [T][V] of the token after each of `token_ids`."""
        logits, _ = self._forward(token_ids)
        return logits

    def loss_and_gradients(
        self, token_ids: Sequence[int], weights: Sequence[float] | None = None
    ) -> tuple[float, Parameters]:
        """Weighted cross-entropy of each token given those before it, and its gradient for every parameter.

        L = -sum_t weights[t] * log p(token[t+1] | token[0..t]). The default weights, 1/(T-1) each, give the
        loss of pretraining. Weights of 0 on the prompt give supervised fine-tuning. With the advantage of a
        completion as weight, the gradient is the policy gradient.

        Returns:
            L, and a dictionary with the shapes of `parameters`.
        """
        self.gradients = {name: _zeros_like(value) for name, value in self.parameters.items()}
        logits, back = self._forward(token_ids[:-1])
        targets = token_ids[1:]
        if weights is None:
            weights = [1 / len(targets)] * len(targets)

        loss, dlogits = 0.0, []
        for row, target, weight in zip(logits, targets, weights, strict=True):
            loss -= weight * (row[target] - log_sum_exp(row))
            # d(-log p_target)/dz_j = p_j - [j = target]: gradient descent lowers every logit in proportion to
            # its probability, and raises the target's.
            dlogits.append([weight * (p_j - (j == target)) for j, p_j in enumerate(softmax(row))])
        back(dlogits)
        return loss, self.gradients

    # ---- the model, top down ----------------------------------------------------------------------------

    def _forward(self, token_ids: Sequence[int]) -> tuple[Matrix, Callable[[Matrix], None]]:
        x, back_embed = self._embed(token_ids)
        back_layers = []
        for layer in range(self.config.num_layers):
            x, back = self._block(x, f"model.layers.{layer}")
            back_layers.append(back)
        x, back_norm = self._rms_norm(x, "model.norm.weight")
        # Tied models compare x with the embedding of each vocabulary entry.
        head = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        logits, back_head = self._linear(x, head)

        def pullback(dlogits: Matrix) -> None:
            dx = back_norm(back_head(dlogits))
            for back in reversed(back_layers):
                dx = back(dx)
            back_embed(dx)

        return logits, pullback

    def _block(self, x: Matrix, name: str) -> tuple[Matrix, Pullback]:
        """One layer. The sums form the residual stream, through which dx reaches lower layers unchanged."""
        normed, back_norm_1 = self._rms_norm(x, f"{name}.input_layernorm.weight")
        attended, back_attention = self._attention(normed, f"{name}.self_attn")
        x = add(x, attended)
        normed, back_norm_2 = self._rms_norm(x, f"{name}.post_attention_layernorm.weight")
        transformed, back_mlp = self._mlp(normed, f"{name}.mlp")
        x = add(x, transformed)

        def pullback(dx: Matrix) -> Matrix:
            # y = x + f(x) gives dx = dy + f's pullback of dy: once for each of the two sums.
            dx = add(dx, back_norm_2(back_mlp(dx)))
            return add(dx, back_norm_1(back_attention(dx)))

        return x, pullback

    def _attention(self, x: Matrix, name: str) -> tuple[Matrix, Pullback]:
        """Each token's query q is matched with the keys k up to it, and their values v are averaged."""
        D = self.config.head_dim
        q, back_q = self._linear(x, f"{name}.q_proj")
        k, back_k = self._linear(x, f"{name}.k_proj")
        v, back_v = self._linear(x, f"{name}.v_proj")
        q_heads, k_heads, v_heads = split_heads(q, D), split_heads(k, D), split_heads(v, D)
        q_prepared = [self._prepare(head, f"{name}.q_norm.weight") for head in q_heads]
        k_prepared = [self._prepare(head, f"{name}.k_norm.weight") for head in k_heads]

        # Grouped queries: H / G consecutive query heads share one key-value head.
        share = len(q_heads) // len(k_heads)
        outputs, back_heads = [], []
        for h, (q_head, _) in enumerate(q_prepared):
            out, back = attend(q_head, k_prepared[h // share][0], v_heads[h // share])
            outputs.append(out)
            back_heads.append(back)
        y, back_o = self._linear(join_heads(outputs), f"{name}.o_proj")

        def pullback(dy: Matrix) -> Matrix:
            dq_heads: list[Matrix] = []
            dk_heads = [_zeros_like(head) for head in k_heads]
            dv_heads = [_zeros_like(head) for head in v_heads]
            for h, dout in enumerate(split_heads(back_o(dy), D)):
                dq, dk, dv = back_heads[h](dout)
                dq_heads.append(q_prepared[h][1](dq))
                # A shared head receives the sum of the gradients of the heads that use it.
                dk_heads[h // share] = add(dk_heads[h // share], dk)
                dv_heads[h // share] = add(dv_heads[h // share], dv)
            dk_heads = [back(dk) for (_, back), dk in zip(k_prepared, dk_heads, strict=True)]
            dx_q, dx_k = back_q(join_heads(dq_heads)), back_k(join_heads(dk_heads))
            return add(add(dx_q, dx_k), back_v(join_heads(dv_heads)))

        return y, pullback

    def _prepare(self, head: Matrix, norm: str) -> tuple[Matrix, Pullback]:
        """A head's queries or keys: normalized (only in Qwen3, to bound the scores), then rotated."""
        back_norm: Pullback = _identity
        if self.config.family.qk_norm:
            head, back_norm = self._rms_norm(head, norm)
        frequencies = rope_frequencies(self.config)
        rotated = [rotate(row, t, frequencies) for t, row in enumerate(head)]

        def pullback(dy: Matrix) -> Matrix:
            # A rotation's transpose is the rotation back.
            return back_norm([rotate(row, -t, frequencies) for t, row in enumerate(dy)])

        return rotated, pullback

    def _mlp(self, x: Matrix, name: str) -> tuple[Matrix, Pullback]:
        """SwiGLU: y = down(silu(gate(x)) * up(x)) with silu(a) = a * sigmoid(a)."""
        a, back_gate = self._linear(x, f"{name}.gate_proj")
        b, back_up = self._linear(x, f"{name}.up_proj")
        s = [[sigmoid(value) for value in row] for row in a]
        h = multiply(multiply(a, s), b)
        y, back_down = self._linear(h, f"{name}.down_proj")

        def pullback(dy: Matrix) -> Matrix:
            dh = back_down(dy)
            db = multiply(dh, multiply(a, s))
            # s' = s (1 - s), so d(a s)/da = s + a s (1 - s).
            slope = [
                [si + ai * si * (1 - si) for ai, si in zip(*rows, strict=True)]
                for rows in zip(a, s, strict=True)
            ]
            da = multiply(multiply(dh, b), slope)
            return add(back_gate(da), back_up(db))

        return y, pullback

    # ---- the operations that own parameters -------------------------------------------------------------

    def _embed(self, token_ids: Sequence[int]) -> tuple[Matrix, Callable[[Matrix], None]]:
        """Row `token` of the table; its gradient goes back to that row."""
        name = "model.embed_tokens.weight"
        table: Matrix = self.parameters[name]

        def pullback(dx: Matrix) -> None:
            for token, row in zip(token_ids, dx, strict=True):
                accumulate(self.gradients[name][token], row)

        return [list(table[token]) for token in token_ids], pullback

    def _linear(self, x: Matrix, name: str) -> tuple[Matrix, Pullback]:
        """y_i = sum_j W_ij x_j + b_i for each token; the bias is optional."""
        W: Matrix = self.parameters[f"{name}.weight"]
        bias: Vector = self.parameters.get(f"{name}.bias", [0.0] * len(W))
        y = [[dot(row, x_t) + b for row, b in zip(W, bias, strict=True)] for x_t in x]

        def pullback(dy: Matrix) -> Matrix:
            columns = list(zip(*W, strict=True))
            for x_t, dy_t in zip(x, dy, strict=True):
                for row, dy_i in zip(self.gradients[f"{name}.weight"], dy_t, strict=True):
                    accumulate(row, [dy_i * x_j for x_j in x_t])  # dW_ij = sum over tokens of dy_i x_j
                if f"{name}.bias" in self.gradients:
                    accumulate(self.gradients[f"{name}.bias"], dy_t)
            return [[dot(column, dy_t) for column in columns] for dy_t in dy]  # dx_j = sum_i dy_i W_ij

        return y, pullback

    def _rms_norm(self, x: Matrix, name: str) -> tuple[Matrix, Pullback]:
        """y_i = w_i x_i r with r = 1 / sqrt(mean_j x_j^2 + eps): x scaled to a mean square of 1."""
        w: Vector = self.parameters[name]
        r = [1 / math.sqrt(dot(row, row) / len(row) + self.config.rms_norm_eps) for row in x]
        y = [
            [w_i * x_i * r_t for w_i, x_i in zip(w, row, strict=True)] for row, r_t in zip(x, r, strict=True)
        ]

        def pullback(dy: Matrix) -> Matrix:
            dx = []
            for row, r_t, dy_t in zip(x, r, dy, strict=True):
                accumulate(
                    self.gradients[name], [dy_i * x_i * r_t for dy_i, x_i in zip(dy_t, row, strict=True)]
                )
                # dr/dx_i = -r^3 x_i / n; so with g = w * dy:  dx_i = r g_i - x_i r^3 (g . x) / n.
                # The second term removes the part of g along x, because scaling x does not change y.
                g = [w_i * dy_i for w_i, dy_i in zip(w, dy_t, strict=True)]
                along = r_t**3 * dot(g, row) / len(row)
                dx.append([r_t * g_i - along * x_i for g_i, x_i in zip(g, row, strict=True)])
            return dx

        return y, pullback


def attend(
    q: Matrix, k: Matrix, v: Matrix
) -> tuple[Matrix, Callable[[Matrix], tuple[Matrix, Matrix, Matrix]]]:
    """Causal attention of one head: out_t = sum_{u <= t} p_tu v_u with p_t = softmax_u(q_t . k_u / sqrt(D)).

    Dividing by sqrt(D) keeps the variance of the scores independent of D. The pullback returns (dq, dk, dv).
    """
    scale = 1 / math.sqrt(len(q[0]))
    p = [softmax([scale * dot(q_t, k_u) for k_u in k[: t + 1]]) for t, q_t in enumerate(q)]
    out = [weighted_sum(p_t, v) for p_t in p]

    def pullback(dout: Matrix) -> tuple[Matrix, Matrix, Matrix]:
        dq, dk, dv = _zeros_like(q), _zeros_like(k), _zeros_like(v)
        for t, (p_t, dout_t) in enumerate(zip(p, dout, strict=True)):
            dp = [dot(dout_t, v_u) for v_u in v[: t + 1]]
            # softmax: dp_u/ds_w = p_u ([u = w] - p_w), so ds_u = p_u (dp_u - sum_w p_w dp_w):
            # a score rises when its value was more useful than the average value.
            average = dot(p_t, dp)
            for u, (p_tu, dp_u) in enumerate(zip(p_t, dp, strict=True)):
                ds = p_tu * (dp_u - average) * scale
                accumulate(dq[t], [ds * k_i for k_i in k[u]])
                accumulate(dk[u], [ds * q_i for q_i in q[t]])
                accumulate(dv[u], [p_tu * d_i for d_i in dout_t])
        return dq, dk, dv

    return out, pullback


def rope_frequencies(config: DecoderConfig) -> Vector:
    """Rotation of each of the D/2 pairs in radians per token; fast pairs resolve near positions.

    theta_i = base^(-2i/D) (Su et al. 2021). Llama 3.1 stretches pairs that turn less than `low` times in the
    original context by `factor`, keeps those that turn more than `high` times, and blends in between.
    """
    D, scaling = config.head_dim, config.rope.scaling
    frequencies = [config.rope.theta ** (-2 * i / D) for i in range(D // 2)]
    if scaling is None:
        return frequencies
    assert isinstance(scaling, Llama3Scaling)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    stretched = []
    for frequency in frequencies:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        stretched.append(keep * frequency + (1 - keep) * frequency / scaling.factor)
    return stretched


def rotate(x: Vector, position: int, frequencies: Vector) -> Vector:
    """Turn each pair (x_i, x_{i+D/2}) by position * theta_i.

    The dot product of two vectors turned by t and u depends on the angle between them, so on t - u alone:
    attention sees how far apart tokens are, and not where they stand.
    """
    half = len(x) // 2
    y = list(x)
    for i, frequency in enumerate(frequencies):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        y[i] = x[i] * cos - x[i + half] * sin
        y[i + half] = x[i + half] * cos + x[i] * sin
    return y


def softmax(scores: Vector) -> Vector:
    """p_i = exp(s_i) / sum_j exp(s_j), written as exp(s_i - log_sum_exp(s))."""
    total = log_sum_exp(scores)
    return [math.exp(score - total) for score in scores]


def log_sum_exp(scores: Vector) -> float:
    """log sum_j exp(s_j), so that log p_i = s_i - this; with the largest taken out, nothing overflows."""
    top = max(scores)
    return top + math.log(sum(math.exp(score - top) for score in scores))


def sigmoid(a: float) -> float:
    """1 / (1 + exp(-a)), by the tanh that cannot overflow."""
    return 0.5 * (1 + math.tanh(0.5 * a))


# ---- arithmetic on lists ----------------------------------------------------------------------------------


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """sum_i a_i b_i."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def weighted_sum(weights: Vector, rows: Matrix) -> Vector:
    """sum_u weights_u rows_u over the first len(weights) rows."""
    return [dot(weights, column) for column in zip(*rows[: len(weights)], strict=True)]


def add(a: Matrix, b: Matrix) -> Matrix:
    """a + b, element by element."""
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def multiply(a: Matrix, b: Matrix) -> Matrix:
    """a * b, element by element."""
    return [[x * y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def accumulate(into: Vector, values: Sequence[float]) -> None:
    """into += values."""
    for i, value in enumerate(values):
        into[i] += value


def split_heads(x: Matrix, D: int) -> list[Matrix]:
    """[T][H * D] -> [H][T][D]."""
    return [[row[start : start + D] for row in x] for start in range(0, len(x[0]), D)]


def join_heads(heads: list[Matrix]) -> Matrix:
    """[H][T][D] -> [T][H * D]."""
    return [[value for part in rows for value in part] for rows in zip(*heads, strict=True)]


def _identity(dy: Matrix) -> Matrix:
    return dy


def _zeros_like(value: Any) -> Any:
    return [_zeros_like(item) for item in value] if isinstance(value, list) else 0.0


# ---- the parameters ---------------------------------------------------------------------------------------


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter of the model by its Hugging Face name."""
    d, ff, D = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * D, config.num_kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        projections = {
            f"{attention}.q_proj": (queries, d),
            f"{attention}.k_proj": (keys, d),
            f"{attention}.v_proj": (keys, d),
            f"{attention}.o_proj": (d, queries),
            f"{mlp}.gate_proj": (ff, d),
            f"{mlp}.up_proj": (ff, d),
            f"{mlp}.down_proj": (d, ff),
        }
        for name, shape in projections.items():
            shapes[f"{name}.weight"] = shape
            if config.mlp_bias if name.startswith(mlp) else config.attention_bias:
                shapes[f"{name}.bias"] = shape[:1]
        for norm in ("q_norm", "k_norm") if config.family.qk_norm else ():
            shapes[f"{attention}.{norm}.weight"] = (D,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (d,)
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def random_parameters(config: DecoderConfig, seed: int = 0) -> Parameters:
    """A new model: normal weights, norms of one, biases of zero."""
    generator = random.Random(seed)
    parameters: Parameters = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            parameters[name] = [0.0 if name.endswith(".bias") else 1.0] * shape[0]
        else:
            deviation = config.initializer_range
            parameters[name] = [
                [generator.gauss(0.0, deviation) for _ in range(shape[1])] for _ in range(shape[0])
            ]
    return parameters
