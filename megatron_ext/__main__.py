"""``python -m megatron_ext``: the console script under torchrun."""

from megatron_ext.cli.main import main

if __name__ == "__main__":
    main()
