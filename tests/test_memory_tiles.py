from mesp_mlx.memory import tiles


def test_blocks_of_queries_follow_the_bytes_of_their_scores():
    assert tiles.query_tile(1, 4, 50, None) == 50
    assert tiles.query_tile(1, 4, 100, None) == 64
    assert tiles.query_tile(1, 4, 2048, None) == 48  # 4 * 48 * 2048 * 4 bytes = 1.6 MB
    assert tiles.query_tile(8, 32, 8192, None) == 16
    assert tiles.query_tile(1, 4, 8192, 64) == 64
    assert tiles.query_tile(1, 4, 2048, None, 1_100_000) == 32


def test_tiles_of_the_width_are_multiples_of_every_group_size():
    assert [tiles.width_tile(256, width) for width in (64, 576, 896, 4096, 8192)] == [1664, 640, 384, 128, 128]
    assert tiles.width_tile(2048, 576) == 128  # many tokens: the arrays [N, f] are the larger ones
    assert tiles.width_tile(256, 576, 4_000_000) == 1664


def test_tiles_of_weights_follow_their_bytes():
    assert tiles.weight_rows(576, 4) == 864 and tiles.weight_rows(576, 2) == 1736  # 1,999,872 and 1,999,872 bytes
    assert tiles.weight_rows(896, 4, 1) == 8
