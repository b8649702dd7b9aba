"""Print the folder of the local tasks, for lmms-eval's --include_path."""
from pathlib import Path

if __name__ == "__main__":
    print(Path(__file__).parent / "tasks")
