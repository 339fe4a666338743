"""`python -m mesp_mlx` is `mesp-mlx`."""

from mesp_mlx.cli import main

if __name__ == "__main__":
    main()
