"""The arrays inside a stage at its fullest moment, by name: what reading the ops says must exist at once.

N positions in the group that computes, D the model's width, H and K heads and key heads of width d, F the MLP's width, R the rank, f a tile of F, v a tile
of the vocabulary, n query rows of a block and S the keys they see. What an evaluation is given (weights, adapter, states) is not inside; what it gives
is. MLX allocates ahead of what it computes, up to the room that the plan leaves it: see `plan`.
"""

from mesp_mlx.memory import tiles
from mesp_mlx.memory.table import ATTENTION, Row, Shape
from mesp_mlx.model.spec import PROJECTIONS

DRAWN_TOKENS = 64  # of which dropout's numbers are drawn at a time
UNPACKING = 1.25  # bytes of a tile while it is dequantised, over the tile's: codes become numbers of the activations' size beside the bytes they were in


def attention_forward(shape: Shape, layer: int) -> list[Row]:
    """First q is projected from h, then a block of scores is made of q, k and v, then y is projected from what the blocks gave."""
    heads, kv = _widths(shape)
    if shape.workload.backend == "numpy":  # which holds what a name refers to
        named = [_act(shape, "q, attention", heads, 2), _act(shape, "k, v, before and after rotation", kv, 4)]
        return named + _fullest(
            [_act(shape, "h", shape.workload.spec.hidden_size), *_scores(shape, layer, 2)],
            [_act(shape, "projected, y", shape.workload.spec.hidden_size, 2), *_unpacked(shape)],
        )
    return _fullest(
        [_act(shape, "h, y of q's tiles", shape.workload.spec.hidden_size), _act(shape, "q", heads), *_unpacked(shape)],
        [_act(shape, "q, blocks", heads, 2), _act(shape, "k, v", kv, 2), _act(shape, "h", shape.workload.spec.hidden_size), *_scores(shape, layer, 2)],
        [_act(shape, "q, attention", heads, 2), _act(shape, "k, v", kv, 2), _act(shape, "projected, y", shape.workload.spec.hidden_size, 2)],
    )


def attention_backward(shape: Shape, layer: int) -> list[Row]:
    """Blocks of scores reversed; then what the gradients of q, k and v come to, while those of the adapters wait."""
    width, (heads, kv) = shape.workload.spec.hidden_size, _widths(shape)
    gradients = shape.workload.adapters["attention"][layer].rows("gradients", "attention: ")
    terms = 4 if shape.workload.backend == "numpy" else 5  # where sums are made in place
    return gradients + _fullest(
        [_act(shape, "h", width), _act(shape, "q, dattention, dq twice", heads, 4), _act(shape, "k, v, dk, dv", kv, 6), *_scores(shape, layer, 4)],
        [
            _act(shape, "h, dh, its terms, dx", width, terms),
            _act(shape, "q, dq and their heads", heads, 4),
            _act(shape, "k, v, dk, dv", kv, 4),
            *_unpacked(shape),
        ],
    )


def mlp_forward(shape: Shape) -> list[Row]:
    """Tiles of gate, up and down are dequantised; then their last products are added up."""
    width, f = shape.workload.spec.hidden_size, shape.width_tile
    whole = shape.workload.spec.intermediate_size
    if shape.workload.backend == "numpy":
        kept = [_act(shape, "pieces of gate and up", whole, 3 if shape.strategy.keep == "all" else 0)]
        return [*kept, _act(shape, "h, y", width, 2), _act(shape, "g, u, z and what they are made of", f, 6), *_width_tiles(shape, 3)]
    moments = [
        [_act(shape, "h", width), _sum(shape, "y", width), _act(shape, "g, u", f, 2), *_width_tiles(shape, 3)],
        [_act(shape, "h", width), _sum(shape, "y, its next term", width, 2), _act(shape, "g, u, z", f, 3), *_width_tiles(shape, 1)],
    ]
    if shape.strategy.keep != "all":
        return _fullest(*moments)
    pieces = _act(shape, "pieces of gate and up", whole, 2)
    return _fullest(*([*moment, pieces] for moment in moments), [_sum(shape, "y", width), _act(shape, "gate and up, pieces of one", whole, 3)])


def mlp_backward(shape: Shape, layer: int) -> list[Row]:
    """The same with the gradients of the tile's arrays, and dx summed over tiles."""
    width, f = shape.workload.spec.hidden_size, shape.width_tile
    gradients = shape.workload.adapters["mlp"][layer].rows("gradients", "mlp: ")
    if shape.workload.backend == "numpy":
        return [*gradients, _act(shape, "h, dx", width, 2), _act(shape, "g, u, z, gradients and what they are made of", f, 9), *_width_tiles(shape, 5)]
    return gradients + _fullest(
        [_act(shape, "h", width), _sum(shape, "dx, its next term", width, 2), _act(shape, "g, u, phi, slope", f, 4), *_width_tiles(shape, 3)],
        [_act(shape, "h", width), _sum(shape, "dx, two terms", width, 3), _act(shape, "g, u, z and gradients", f, 6), *_width_tiles(shape, 1)],
    )


def dropout(shape: Shape, kind: str) -> list[Row]:
    """The masks of a stage's modules, what they leave of its inputs, and the numbers that a mask is drawn from; nothing where nothing is dropped."""
    spec, n = shape.workload.spec, shape.tokens
    if not shape.workload.dropout:
        return []
    widths = [spec.hidden_size] * 3 + [spec.num_heads * spec.head_dim] if kind == "attention" else [spec.hidden_size] * 2 + [spec.intermediate_size]
    drawn = Row("stage", "numbers that a mask is drawn from", (DRAWN_TOKENS, max(widths)), "float32", 4)
    return [Row("stage", "dropout's masks", (n, sum(widths)), "bool"), _act(shape, "inputs after dropout", spec.hidden_size, 2), drawn]


def layer_forward(shape: Shape, layer: int) -> list[Row]:
    """A plain layer: whole scores, gate and up."""
    spec, (heads, kv) = shape.workload.spec, _widths(shape)
    wide = [_act(shape, "x, h, m", spec.hidden_size, 3), _act(shape, "heads", heads + kv, 2), _act(shape, "g, u, z", spec.intermediate_size, 3)]
    return [*wide, _square(shape, "scores", 2), *_unpacked(shape, PROJECTIONS)]


def layer_kept(shape: Shape) -> list[Row]:
    """What whole-graph autodiff keeps of a layer for its backward."""
    spec, (heads, kv) = shape.workload.spec, _widths(shape)
    wide = [_act(shape, "x, h, m", spec.hidden_size, 5), _act(shape, "heads", heads + kv, 3), _act(shape, "g, u, z", spec.intermediate_size, 4)]
    return [*wide, _square(shape, "probabilities", 1)]


def layer_backward(shape: Shape, layer: int) -> list[Row]:
    """A plain layer while autodiff reverses it: all that it made, and as much again for its gradients."""
    spec, (heads, kv) = shape.workload.spec, _widths(shape)
    gradients = [row for kind, layouts in shape.workload.adapters.items() for row in layouts[layer].rows("gradients", f"{kind}: ")]
    if shape.workload.backend == "numpy":  # whose tape lets go of what it has passed: of the MLP before attention is reached
        inputs = [*gradients, _act(shape, "x, h, m", spec.hidden_size, 7), *_unpacked(shape, PROJECTIONS)]
        return inputs + _fullest(
            [_act(shape, "heads", heads + kv, 2), _act(shape, "g, u, z", spec.intermediate_size, 6), _square(shape, "probabilities", 1)],
            [_act(shape, "heads", heads + kv, 5), _square(shape, "probabilities", 3)],
        )
    wide = [_act(shape, "x, h, m", spec.hidden_size, 6), _act(shape, "heads", heads + kv, 4), _act(shape, "g, u, z", spec.intermediate_size, 6)]
    return [*gradients, *wide, _square(shape, "probabilities", 4), *_unpacked(shape, PROJECTIONS)]


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
    return [row, *_unpacked(shape, PROJECTIONS)]


def embedding(shape: Shape) -> list[Row]:
    """The rows of the table that the tokens name, dequantised, and x."""
    n = min(shape.tokens, shape.workload.spec.vocab_size)
    return [Row("stage", "rows of the table", (n, shape.workload.spec.hidden_size), shape.workload.dtype), _act(shape, "x", shape.workload.spec.hidden_size)]


def _widths(shape: Shape) -> tuple[int, int]:
    """Of all heads together, and of all key heads."""
    spec = shape.workload.spec
    return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim


def _fullest(*moments: list[Row]) -> list[Row]:
    return max(moments, key=lambda rows: sum(row.bytes for row in rows))


def _act(shape: Shape, name: str, width: int, count: int = 1) -> Row:
    return Row("stage", name, (shape.tokens, width), shape.workload.dtype, count)


def _sum(shape: Shape, name: str, width: int, count: int = 1) -> Row:
    return Row("stage", name, (shape.tokens, width), "float32", count)


def _square(shape: Shape, name: str, count: int) -> Row:
    width = shape.workload.width
    return Row("stage", name, (shape.group_rows, shape.workload.spec.num_heads, width, width), "float32", count)


def _scores(shape: Shape, layer: int, count: int) -> list[Row]:
    window = shape.workload.spec.windows[layer]
    block = (shape.group_rows, shape.workload.spec.num_heads, shape.query_tile(window), shape.keys(window))
    return [Row("stage", "scores of a block", block, "float32", count)]


def _unpacked(shape: Shape, projections: tuple[str, ...] = ATTENTION) -> list[Row]:
    """The largest dequantised tile of a product with one of these, while it is made."""
    workload = shape.workload
    if not workload.on_cpu:
        return []
    sizes, tile_bytes = [], tiles.WEIGHT_BYTES if workload.plain else shape.strategy.weight_tile or tiles.WEIGHT_BYTES
    for out, width in map(workload.spec.linear_shape, projections):
        rows = min(out, tiles.weight_rows(width, workload.itemsize, tile_bytes))
        sizes.append(rows * width * workload.itemsize)
    at_once = 2 if workload.plain and workload.backend == "numpy" else 1  # a loop in NumPy still holds the tile before
    if workload.method == "backprop":  # measured: MLX, without a limit, dequantises as many as a layer has products
        at_once = 3 if workload.backend == "numpy" else 1 if workload.grad_checkpoint else len(PROJECTIONS)
    return [Row("stage", "a weight's dequantised tile", (int(UNPACKING * max(sizes)),), "uint8", at_once)]


def _width_tiles(shape: Shape, count: int) -> list[Row]:
    if not shape.workload.on_cpu:
        return []
    tile = (shape.width_tile, shape.workload.spec.hidden_size)
    return [Row("stage", "dequantised tiles of gate, up, down", tile, shape.workload.dtype, count)]
