"""`python -m varuna` is the command `varuna`."""

from varuna.cli.main import main

if __name__ == "__main__":
    main()
