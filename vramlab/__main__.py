"""``python -m vramlab``: what this machine has, and what to mend."""

from vramlab.devices import describe

if __name__ == "__main__":
    for name, value in describe().items():
        print(f"{name:26}{value}")
