"""`python -m lynxkv_cli` is the `lynxkv` command."""

from lynxkv_cli.main import main

if __name__ == "__main__":
    main()
