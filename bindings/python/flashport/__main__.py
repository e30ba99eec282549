"""``python -m flashport`` is the command ``flashport``."""

from flashport.cli import run

if __name__ == "__main__":
    run()
