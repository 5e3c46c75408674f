"""A whole step of the decoder in one call of the C kernels."""

from ctypes import POINTER, Array, Structure, addressof, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from perilune.models.config.decoder_config import DecoderConfig
from perilune.models.config.rope import Rope
from perilune.models.decoder import NORM_NAMES, Block, Decoder, SelfAttention
from perilune.models.feed_forward import MLP, GatedNetwork, MixtureOfExperts
from perilune.models.layers import Projection, RMSNorm, get_bias
from perilune.models.native import ops
from perilune.models.native.attention import Cache, Step
from perilune.models.native.ops import LANES, PANEL, PackedWeight, Weight, WeightKind, pack_parts


class _Layer(Structure):
    """struct layer."""

    _fields_ = (
        *((name, Weight) for name in ("qkv", "out", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks", "cosine", "sine")),
        ("window", c_int64),
        ("router", Weight),
        ("experts", c_void_p),
        ("sparse_index", c_int64),
    )


class _Expert(Structure):
    """struct expert."""

    _fields_ = (("gate_up", Weight), ("down", Weight))


class _Model(Structure):
    """struct model."""

    _fields_ = (
        *(
            (name, c_int64)
            for name in ("layers", "hidden", "inner", "heads", "kv_heads", "size", "vocabulary")
        ),
        *((name, c_int64) for name in ("experts", "experts_per_token", "expert_inner", "normalized")),
        *((name, c_int64) for name in ("qk_norm_whole", "activation", "embedding_kind")),
        *((name, c_void_p) for name in ("layer", "embedding", "final_norm")),
        ("head", Weight),
        *((name, c_float) for name in ("eps", "attention_scale", "embedding_scale")),
    )


def supports(config: DecoderConfig, kind: WeightKind = "float32") -> bool:
    """Return whether `NativeDecoder` can compute this model.

    Sizes must be multiples of the kernels' vectors and panels. The kernels do not implement latent and linear
    attention, for example.
    """
    inner = [config.intermediate_size] + ([config.experts.intermediate_size] if config.experts else [])
    even = kind != "bfloat16" or all(size % 2 == 0 for size in inner)
    if not _is_plain(config):
        return False
    fits = config.hidden_size % LANES == 0 and config.head_dim % PANEL == 0
    return fits and even and config.latent is None and config.delta is None and ops.is_available()


def _is_plain(config: DecoderConfig) -> bool:
    """Return whether the kernels implement all kinds of layers of the model."""
    experts, family = config.experts, config.family
    routed = experts is None or (not experts.shared_size and experts.scale == 1)
    scaled = config.query_scale == 1 or config.qk_norm == "head"
    whole = config.rope.fraction == 1 and config.score_softcap is None
    residual = config.multipliers is None or config.multipliers.residual == 1
    fused = (
        family.module_name("gate_proj") == family.module_name("up_proj") and config.intermediate_size % PANEL
    )
    return routed and family.router == "softmax" and scaled and whole and residual and not fused


class NativeDecoder:
    """A copy of a decoder's current weights, which computes steps over a paged cache.

    In float32 the results equal those of the decoder bit for bit, in every batch.

    Args:
        decoder: a decoder on the CPU that `supports` accepts.
        kind: how matrices are stored. "bfloat16" also rounds the activations; sums are always float32.
    """

    def __init__(self, decoder: Decoder, kind: WeightKind) -> None:
        self.config = decoder.config
        self._kind: WeightKind = kind
        self._layers: Array[_Layer] = (_Layer * self.config.num_layers)()
        self._matrices: list[Tensor] = []  # the memory that the structures point to
        self._vectors: list[Tensor] = []
        self.load(decoder)

    def load(self, decoder: Decoder) -> None:
        """Copy the current weights of `decoder`. New matrices overwrite the memory of the old matrices."""
        self._decoder = decoder  # for the rotary tables
        self._buffers = iter(self._matrices)
        self._matrices, self._vectors = [], []
        self._experts: list[Array[_Expert]] = []  # of each sparse layer
        for index, block in enumerate(decoder.model.layers):
            with decoder.in_memory(block):
                self._layers[index] = self._layer(block)  # type: ignore[arg-type]
        with decoder.in_memory(decoder.model.embed_tokens, *decoder.head.parts):
            self._model = self._describe(decoder)
        self._reach = 0
        self._reserve(1)

    def step(self, caches: Array[Cache], step: Step, last: int) -> None:
        """Compute `step`, whose largest position is `last`. Writes the logits of the step and the caches."""
        self._reserve(last + 1)
        ops.check(
            ops.kernel("step", POINTER(_Model), POINTER(Cache), POINTER(Step), c_int64)(
                byref(self._model), caches, step, ops.threads()
            ),
            "a decoding step",
        )

    def _describe(self, decoder: Decoder) -> _Model:
        config, experts = self.config, self.config.experts
        table = torch.float32 if self._kind == "float32" else torch.bfloat16
        embedding = None
        if self._kind == "int8" or not config.tie_word_embeddings:  # otherwise the packed head is the table
            embedding = decoder.model.embed_tokens.weight.detach().to(table, copy=True)
            self._vectors.append(embedding)
        return _Model(
            layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            size=config.head_dim,
            vocabulary=config.vocab_size,
            experts=experts.count if experts else 0,
            experts_per_token=experts.per_token if experts else 0,
            expert_inner=experts.intermediate_size if experts else 0,
            normalized=experts.normalized if experts else False,
            qk_norm_whole=config.qk_norm == "full",
            activation=ops.ACTIVATIONS[config.family.activation],
            embedding_kind=ops.KINDS[table],
            layer=addressof(self._layers),
            embedding=None if embedding is None else embedding.data_ptr(),
            final_norm=self._vector(decoder.model.norm.factor()),
            head=self._weight(decoder.head),
            eps=config.rms_norm_eps,
            attention_scale=config.head_dim**-0.5,
            embedding_scale=config.embedding_scale,
        )

    def _layer(self, block: Block) -> _Layer:
        attention, family = block.self_attn, self.config.family
        assert isinstance(attention, SelfAttention)  # as `supports` requires
        before_attention, after_attention, before_mlp, after_mlp = (
            self._norm(getattr(block, name) if name else None)
            for name in NORM_NAMES[family.pre_norm, family.post_norm]
        )
        q_norm = k_norm = None
        if attention.qk_norm == "head":
            weights = attention.qk_norm_weight()
            q_norm, k_norm = self._vector(weights[0]), self._vector(weights[attention.heads])
        elif attention.qk_norm == "full":
            q_norm, k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        return _Layer(
            qkv=self._weight(attention.qkv),
            out=self._weight(attention.out),
            **self._feed_forward(block.feed_forward),
            attention_norm=before_attention,
            mlp_norm=before_mlp,
            attention_out_norm=after_attention,
            mlp_out_norm=after_mlp,
            q_norm=q_norm,
            k_norm=k_norm,
            sinks=None if attention.sinks is None else self._vector(attention.sinks),
            window=attention.window or 0,
        )

    def _feed_forward(self, mlp: MLP | MixtureOfExperts) -> dict[str, Weight | int]:
        if isinstance(mlp, MLP):
            return {"gate_up": self._weight(mlp.gate, mlp.up), "down": self._weight(mlp.down)}
        router = self._weight(mlp.router_map)
        experts = (_Expert * len(mlp.experts))()
        for expert, network in zip(experts, mlp.experts, strict=True):
            assert isinstance(network, GatedNetwork)
            expert.gate_up = self._weight(network.gate, network.up)
            expert.down = self._weight(network.down)
        self._experts.append(experts)
        return {"router": router, "experts": addressof(experts), "sparse_index": mlp.index}

    def _weight(self, first: Projection, *more: Projection | None) -> Weight:
        projections = (first, *filter(None, more))
        parts = [(p.get_weight(part), get_bias(part)) for p in projections for part in p.parts]
        kind: WeightKind = "float32" if first.exact else self._kind
        packed: PackedWeight = pack_parts(parts, kind, next(self._buffers, None))
        self._matrices.append(packed.tensors[0])
        self._vectors += packed.tensors[1:]
        return packed.struct

    def _norm(self, norm: RMSNorm | None) -> int | None:
        return None if norm is None else self._vector(norm.factor())

    def _vector(self, values: Tensor) -> int:
        vector = values.detach().float().clone()
        self._vectors.append(vector)
        return vector.data_ptr()

    def _reserve(self, positions: int) -> None:
        """Extend the rotary tables to `positions`."""
        if positions <= self._reach:
            return
        self._reach = max(positions, 2 * self._reach, 1024)
        self._rotations: dict[Rope | None, list[Tensor]] = {}
        for index, layer in enumerate(self._layers):
            rope = self.config.layer_rope(index)
            if rope not in self._rotations:
                tables = self._tables(rope)
                self._rotations[rope] = [table.float().contiguous() for table in tables]
            layer.cosine, layer.sine = (table.data_ptr() for table in self._rotations[rope])

    def _tables(self, rope: Rope | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [reach, 1, D / 2]; layers without a rotary embedding have angle 0."""
        if rope is None:
            ones = torch.ones(self._reach, 1, self.config.head_dim // 2)
            return ones, torch.zeros_like(ones)
        return self._decoder.rotary(torch.arange(self._reach), rope)
