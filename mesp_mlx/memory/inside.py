"""The arrays inside a stage at its fullest moment, by name: what reading the ops says must exist at once.

N positions in the group that computes, D the model's width, H and K heads and key heads of width d, F the MLP's width, R the rank, f a tile of F, v a tile
of the vocabulary, n query rows of a block and S the keys they see. What an evaluation is given (weights, adapter, states) is not inside; what it gives
is. MLX allocates ahead of what it computes, up to the room that the plan leaves it: see `plan`.

Of experts n is N: all tokens of a group may choose the same one. That is what is planned for, so that no update takes more than the plan says.
"""

from mesp_mlx.memory import tiles
from mesp_mlx.memory.table import Shape
from mesp_mlx.memory.workload import Row
from mesp_mlx.model.spec import ModelSpec

DRAWN_TOKENS = 64  # of which dropout's numbers are drawn at a time
CURVED = {"gelu": 2, "gelu_exact": 1, "gelu_sigmoid": 1}  # arrays more than silu's that a slope is made of, measured
OVERSHOOT = 0.25  # of what a measured layer makes, that its largest array is taken to be
UNPACKING = 1.25  # bytes of a tile while it is dequantised, over the tile's: codes become numbers of the activations' size beside the bytes they were in


def attention_forward(shape: Shape, layer: int) -> list[Row]:
    """First q is projected from h, then a block of scores is made of q, k and v, then y is projected from what the blocks gave."""
    spec, (heads, kv) = _spec(shape), _widths(shape)
    width, after = spec.hidden_size, 1 if spec.post_norm else 0
    if shape.workload.backend == "numpy":  # which holds what a name refers to
        named = [_act(shape, "q, attention", heads, 2), _act(shape, "k, v, before and after rotation", kv, 4), *_fused(shape)]
        return named + _fullest(
            [_act(shape, "h", width), *_scores(shape, layer, 2)],
            [_act(shape, "projected, y", width, 2 + after), *_unpacked(shape, _attention(shape, layer))],
        )
    first = _act(shape, "q, k and v in one, its pieces", heads + 2 * kv, 2) if spec.fused_qkv else _act(shape, "q", heads)
    return _fullest(
        [_act(shape, "h, y of q's tiles", width), first, *_unpacked(shape, _attention(shape, layer))],
        [_act(shape, "q, blocks", heads, 2), _act(shape, "k, v", kv, 2), _act(shape, "h", width), *_scores(shape, layer, 2), *_fused(shape)],
        [_act(shape, "q, attention", heads, 2), _act(shape, "k, v", kv, 2), _act(shape, "projected, y", width, 2 + after), *_fused(shape)],
    )


def attention_backward(shape: Shape, layer: int) -> list[Row]:
    """Blocks of scores reversed; then what the gradients of q, k and v come to, while those of the adapters wait."""
    spec, (heads, kv) = _spec(shape), _widths(shape)
    width = spec.hidden_size
    gradients = shape.workload.adapters["attention"][layer].rows("gradients", "attention: ")
    terms = 3 if spec.fused_qkv else 4 if shape.workload.backend == "numpy" else 5  # of one product there is one; NumPy's sums are made in place
    inner = [_act(shape, "q, dattention, dq twice", heads, 4), _act(shape, "k, v, dk, dv", kv, 6)]
    if spec.fused_qkv:  # as much in all, but one array is the largest of them
        inner = [_act(shape, "q, dattention, dq", heads, 3), _act(shape, "k, v, dk, dv", kv, 4), _act(shape, "dq, dk and dv in one", heads + 2 * kv)]
    return gradients + _fullest(
        [
            _act(shape, "h", width),
            *inner,
            *_scores(shape, layer, 4 if spec.attention_cap is None else 5),
        ],
        [
            _act(shape, "h, dh, its terms, dx", width, terms),
            _act(shape, "q, dq and their heads", heads, 4),
            _act(shape, "k, v, dk, dv", kv, 4),
            *_unpacked(shape, _attention(shape, layer)),
        ],
    )


def attention_kept(shape: Shape, *names: str) -> list[tuple[str, int]]:
    """What the attention keeps, as (name, width) of arrays [N, width]: "q" means q, k and v as they were projected."""
    heads, kv = _widths(shape)
    found = [("q", heads), ("k", kv), ("v", kv)] if "q" in names else []
    return found + ([("attention", heads)] if "attention" in names else [])


def normed(shape: Shape) -> list[tuple[str, int]]:
    """What a norm after a sublayer asks for: what the sublayer gave."""
    return [("y", _spec(shape).hidden_size)] if _spec(shape).post_norm else []


def mlp_kept(shape: Shape, layer: int) -> list[tuple[str, int]]:
    """What the MLP keeps where no product is to be computed twice; of experts what each made for the tokens that chose it, and the router's logits."""
    (width, inner), experts = shape.workload.mlp(layer), _spec(shape).experts[layer]
    found = [(name, width * (experts.chosen if experts else 1)) for name in ("up", "gate")[:inner]]
    return found + ([("logits", experts.count)] if experts else [])


def mlp_forward(shape: Shape, layer: int) -> list[Row]:
    """Tiles of gate, up and down are dequantised; then their last products are added up. Of experts, one does so while y and what led to it wait."""
    spec, f, (whole, inner) = _spec(shape), shape.width_tile(layer), shape.workload.mlp(layer)
    width, keep = spec.hidden_size, shape.strategy.keep == "all" and spec.experts[layer] is None
    around = [*_routed(shape, layer), *([_act(shape, "y after its norm", width)] if spec.post_norm else [])]
    around += [_act(shape, "what phi is made of", f)] if spec.activation in CURVED else []
    if shape.workload.backend == "numpy":
        kept = [_act(shape, "pieces of gate and up", whole, 3 if keep else 0)]
        return [*kept, _act(shape, "h, y", width, 2), _act(shape, "g, u, z and what they are made of", f, 6), *_width_tiles(shape, layer, 1 + inner), *around]
    moments = [
        [_act(shape, "h", width), _sum(shape, "y", width), _act(shape, "g, u", f, inner), *_width_tiles(shape, layer, 1 + inner), *around],
        [_act(shape, "h", width), _sum(shape, "y, its next term", width, 2), _act(shape, "g, u, z", f, 1 + inner), *_width_tiles(shape, layer, 1), *around],
    ]
    if not keep:
        return _fullest(*moments)
    pieces = _act(shape, "pieces of gate and up", whole, inner)
    return _fullest(*([*moment, pieces] for moment in moments), [_sum(shape, "y", width), _act(shape, "gate and up, pieces of one", whole, 1 + inner)])


def mlp_backward(shape: Shape, layer: int) -> list[Row]:
    """The same with the gradients of the tile's arrays, and dx summed over tiles."""
    spec, f, (_, inner) = _spec(shape), shape.width_tile(layer), shape.workload.mlp(layer)
    width = spec.hidden_size
    rows = [*shape.workload.adapters["mlp"][layer].rows("gradients", "mlp: "), *_routed(shape, layer, backward=True)]
    rows += [_act(shape, "y before its norm, its gradient", width, 2)] if spec.post_norm else []
    if shape.workload.backend == "numpy":
        made = [_act(shape, "h, dx", width, 2), _act(shape, "g, u, z, gradients and what they are made of", f, 9), *_width_tiles(shape, layer, 3 + inner)]
        return rows + made
    curved = CURVED.get(spec.activation, 0)
    tiles_first, terms = _act(shape, "g, u, phi, slope", f, 2 + inner + curved), _act(shape, "g, u, z and gradients", f, 2 + 2 * inner + curved)
    return rows + _fullest(
        [_act(shape, "h", width), _sum(shape, "dx, its next term", width, 2), tiles_first, *_width_tiles(shape, layer, 1 + inner)],
        [_act(shape, "h", width), _sum(shape, "dx, two terms", width, 1 + inner), terms, *_width_tiles(shape, layer, 1)],
    )


def dropout(shape: Shape, kind: str, layer: int) -> list[Row]:
    """The masks of a stage's modules, what they leave of its inputs, and the numbers that a mask is drawn from; nothing where nothing is dropped."""
    spec, n = _spec(shape), shape.tokens
    if not shape.workload.dropout:
        return []
    linears = spec.linears(layer)
    widths = [linears[key][-1] for key in (spec.attention_keys(layer) if kind == "attention" else spec.mlp_keys(layer))]
    drawn = Row("stage", "numbers that a mask is drawn from", (DRAWN_TOKENS, max(widths)), "float32", 4)
    return [Row("stage", "dropout's masks", (n, sum(widths)), "bool"), _act(shape, "inputs after dropout", spec.hidden_size, 2), drawn]


def measured(shape: Shape, layer: int, backward: bool) -> list[Row]:
    """What a layer makes that autodiff reverses as mlx-lm wrote it. A fourth of it is taken for the largest array, less where nothing is allocated ahead."""
    found = shape.workload.measured[layer]
    size = (found.backward if backward else found.forward).bytes(shape.group_rows, shape.workload.width)
    count = round(1 / min(OVERSHOOT, max(0.02, found.ahead)))
    return [Row("stage", f"what {found.kind} makes, as measured", (-(-size // count),), "uint8", count)]


def layer_forward(shape: Shape, layer: int) -> list[Row]:
    """A plain layer: whole scores, gate and up."""
    if shape.workload.generic:
        return measured(shape, layer, backward=False)
    spec, (heads, kv), (mlp, inner) = _spec(shape), _widths(shape), _whole_mlp(shape, layer)
    wide = [_act(shape, "x, h, m", spec.hidden_size, 3), _act(shape, "heads", heads + kv, 2), _act(shape, "g, u, z", mlp, 1 + inner)]
    return [*wide, _square(shape, "scores", 2), *_unpacked(shape, _linears(shape, layer))]


def layer_kept(shape: Shape, layer: int) -> list[Row]:
    """What whole-graph autodiff keeps of a layer for its backward."""
    if shape.workload.generic:
        return measured(shape, layer, backward=True)
    spec, (heads, kv), (mlp, inner) = _spec(shape), _widths(shape), _whole_mlp(shape, layer)
    wide = [_act(shape, "x, h, m", spec.hidden_size, 5), _act(shape, "heads", heads + kv, 3), _act(shape, "g, u, z", mlp, 2 + inner)]
    return [*wide, _square(shape, "probabilities", 1 if spec.attention_cap is None else 3)]


def layer_backward(shape: Shape, layer: int) -> list[Row]:
    """A plain layer while autodiff reverses it: all that it made, and as much again for its gradients."""
    if shape.workload.generic:
        return measured(shape, layer, backward=True)
    spec, (heads, kv), (mlp, inner) = _spec(shape), _widths(shape), _whole_mlp(shape, layer)
    gradients = [row for kind, layouts in shape.workload.adapters.items() for row in layouts[layer].rows("gradients", f"{kind}: ")]
    if shape.workload.backend == "numpy":  # whose tape lets go of what it has passed: of the MLP before attention is reached
        given = 7 if shape.workload.method == "backprop" else 9  # a stage's caller holds what goes in and what comes out
        inputs = [*gradients, _act(shape, "x, h, m", spec.hidden_size, given), *_unpacked(shape, _linears(shape, layer))]
        return inputs + _fullest(
            [_act(shape, "heads", heads + kv, 2), _act(shape, "g, u, z", mlp, 2 * (1 + inner)), _square(shape, "probabilities", 1)],
            [_act(shape, "heads", heads + kv, 5), _square(shape, "probabilities", 3)],
        )
    wide = [_act(shape, "x, h, m", spec.hidden_size, 6), _act(shape, "heads", heads + kv, 4), _act(shape, "g, u, z", mlp, 2 * (1 + inner))]
    return [*gradients, *wide, *_scattered(shape, layer), _square(shape, "probabilities", 4), *_unpacked(shape, _linears(shape, layer))]


def head(shape: Shape) -> list[Row]:
    """One group's sweep over a tile of the table: its logits, what is made of them, and the next U."""
    spec, n = shape.workload.spec, shape.supervised
    rows = [Row("head", "logits, p", (n, shape.vocabulary_tile), "float32", 1 if shape.workload.backend == "numpy" else 3)]
    return rows if shape.workload.method == "mezo" else [*rows, Row("head", "U of the next tile", (n, spec.hidden_size), "float32")]


def whole_head(shape: Shape) -> list[Row]:
    """Logits whole, what autodiff makes of them, and a tile of the table."""
    row = Row("head", "logits and their gradients", (shape.tokens, shape.workload.spec.vocab_size), "float32", 3)
    if shape.workload.method == "backprop" and shape.workload.backend == "mlx":  # no limit holds it back
        row = row._replace(count=4)
    return [row, *_unpacked(shape, [] if shape.workload.generic else _linears(shape, 0))]


def embedding(shape: Shape) -> list[Row]:
    """The rows of the table that the tokens name, dequantised, and x."""
    n = min(shape.tokens, shape.workload.spec.vocab_size)
    width, positions = shape.workload.state(0), 1 if shape.workload.positions.arrays else 0
    return [Row("stage", "rows of the table", (n, width), shape.workload.dtype), _act(shape, "x, of words and of positions", width, 1 + positions)]


def _spec(shape: Shape) -> ModelSpec:
    """Of a structured family."""
    assert isinstance(shape.workload.spec, ModelSpec)
    return shape.workload.spec


def _widths(shape: Shape) -> tuple[int, int]:
    """Of all heads together, and of all key heads."""
    spec = _spec(shape)
    return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim


def _linears(shape: Shape, layer: int) -> list[tuple[int, ...]]:
    return list(_spec(shape).linears(layer).values())


def _attention(shape: Shape, layer: int) -> list[tuple[int, ...]]:
    linears = _spec(shape).linears(layer)
    return [linears[key] for key in _spec(shape).attention_keys(layer)]


def _whole_mlp(shape: Shape, layer: int) -> tuple[int, int]:
    """What a plain MLP makes at once, as `Workload.mlp` says it: of experts all that a token chose."""
    (width, inner), experts = shape.workload.mlp(layer), _spec(shape).experts[layer]
    return width * (experts.chosen if experts else 1), inner


def _scattered(shape: Shape, layer: int) -> list[Row]:
    """Autodiff makes the gradient of a stack of experts' A or B of one for each token and expert that it chose; one stack is done before the last is begun."""
    experts = _spec(shape).experts[layer]
    stacks = [size for _, size, _ in shape.workload.adapters["layer"][layer].arrays if len(size) == 3]
    if experts is None:
        return []
    return [Row("stage", "gradients of one token's experts", (shape.tokens * experts.chosen, rows, width), "float32") for _, rows, width in stacks[1:]]


def _fused(shape: Shape) -> list[Row]:
    """What q, k and v are cut from, where one product gives them: v is a part of it, so that it stays."""
    heads, kv = _widths(shape)
    return [_act(shape, "q, k and v in one", heads + kv)] if _spec(shape).fused_qkv else []


def _routed(shape: Shape, layer: int, backward: bool = False) -> list[Row]:
    """What waits while one expert computes: y or dh, what the router gave, the expert's own rows and its share of the result."""
    spec, experts = _spec(shape), _spec(shape).experts[layer]
    if experts is None:
        return []
    n, width = shape.tokens, spec.hidden_size
    router = [Row("stage", "logits of the router", (n, experts.count), "float32", 2)]
    router += [Row("stage", "experts chosen, their weights", (n, experts.chosen), "float32", 4)]
    own = _act(shape, "an expert's x, dy, dx" if backward else "an expert's x, its y", width, 3 if backward else 2)
    return [*router, own, _sum(shape, "dh, its next sum" if backward else "y, its next sum", width, 2)]


def _fullest(*moments: list[Row]) -> list[Row]:
    return max(moments, key=lambda rows: sum(row.bytes for row in rows))


def _act(shape: Shape, name: str, width: int, count: int = 1) -> Row:
    return Row("stage", name, (shape.tokens, width), shape.workload.dtype, count)


def _sum(shape: Shape, name: str, width: int, count: int = 1) -> Row:
    return Row("stage", name, (shape.tokens, width), "float32", count)


def _square(shape: Shape, name: str, count: int) -> Row:
    width = shape.workload.width
    return Row("stage", name, (shape.group_rows, _spec(shape).num_heads, width, width), "float32", count)


def _scores(shape: Shape, layer: int, count: int) -> list[Row]:
    window = _spec(shape).windows[layer]
    block = (shape.group_rows, _spec(shape).num_heads, shape.query_tile(window), shape.keys(window))
    return [Row("stage", "scores of a block", block, "float32", count)]


def _unpacked(shape: Shape, linears: list[tuple[int, ...]]) -> list[Row]:
    """The largest dequantised tile of a product with one of these [out, in], while it is made."""
    workload = shape.workload
    if not workload.on_cpu or not linears:
        return []
    sizes, tile_bytes = [], tiles.WEIGHT_BYTES if workload.plain else shape.strategy.weight_tile or tiles.WEIGHT_BYTES
    for *_, out, width in linears:
        rows = min(out, tiles.weight_rows(width, workload.itemsize, tile_bytes))
        sizes.append(rows * width * workload.itemsize)
    at_once = 2 if workload.plain and workload.backend == "numpy" else 1  # a loop in NumPy still holds the tile before
    if workload.method == "backprop":  # measured: MLX, without a limit, dequantises as many as a layer has products
        at_once = 3 if workload.backend == "numpy" else 1 if workload.grad_checkpoint else len(linears)
    return [Row("stage", "a weight's dequantised tile", (int(UNPACKING * max(sizes)),), "uint8", at_once)]


def _width_tiles(shape: Shape, layer: int, count: int) -> list[Row]:
    if not shape.workload.on_cpu:
        return []
    tile = (shape.width_tile(layer), shape.workload.spec.hidden_size)
    return [Row("stage", "dequantised tiles of gate, up, down", tile, shape.workload.dtype, count)]
