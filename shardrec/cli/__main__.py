"""``python -m shardrec.cli``, for where the ``shardrec`` script is not installed."""

from shardrec.cli.app import main

if __name__ == "__main__":
    main()
