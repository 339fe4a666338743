"""How large tiles are by default: pure rules of shapes, which the ops follow and the plan counts by."""

SCORES_BYTES = 2_000_000  # of the scores of a block of query rows: of a block about six such arrays exist at a time
MLP_BYTES = 1_750_000  # of one dequantised tile [f, D] of the MLP's width, and of one array [N, f]: a few of each exist at a time
WEIGHT_BYTES = 2_000_000  # of dequantised weights in a product: stays in a core's cache, and large enough that a product is not all overhead
PACKED_BYTES = 4_000_000  # of the packed table in memory while groups pass one by one: each is fetched and put back once in so much of it
MOST_QUERIES, LEAST_QUERIES = 64, 16  # half of the square where a block meets the diagonal is masked, and computed in vain


def query_tile(batch: int, heads: int, tokens: int, window: int | None, tile_bytes: int = SCORES_BYTES) -> int:
    """Query rows in a block of attention, so that the float32 scores [B, H, tile, keys] of a block take about tile_bytes."""
    keys = tokens if window is None else min(tokens, window + MOST_QUERIES)
    return min(tokens, MOST_QUERIES, max(LEAST_QUERIES, tile_bytes // (4 * batch * heads * keys) // 16 * 16))


def width_tile(rows: int, width: int, tile_bytes: int = MLP_BYTES) -> int:
    """Columns of the MLP's width F in a tile, for x [rows, width] in float32: a multiple of 128, and so of every group size."""
    return max(128, tile_bytes // (4 * max(rows, width)) // 128 * 128)


def weight_rows(width: int, itemsize: int, tile_bytes: int = WEIGHT_BYTES) -> int:
    """Rows of a weight [out, width] whose dequantised form takes about tile_bytes: a multiple of 8."""
    return max(8, tile_bytes // (width * itemsize) // 8 * 8)


def vocabulary_tile(positions: int, width: int, tile_bytes: int = WEIGHT_BYTES) -> int:
    """Rows of the head's table [V, width] in a tile, whose dequantised form and logits [positions, tile] take about tile_bytes each: a multiple of 64."""
    return max(64, tile_bytes // (4 * max(positions, width)) // 64 * 64)


def packed_rows(tile: int, width: int) -> int:
    """Rows of the head's table that are read at once for groups that pass one by one: whole tiles, about PACKED_BYTES at 4 bits."""
    return max(1, PACKED_BYTES * 2 // width // tile) * tile
