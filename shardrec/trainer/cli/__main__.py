"""``python -m shardrec.trainer.cli``, for where the ``shardrec`` script is not installed."""

from shardrec.trainer.cli.app import main

if __name__ == "__main__":
    main()
