"""Accepts ``python -m torch_ort.configure``, and does nothing."""

if __name__ == "__main__":
    print("ortmodule needs no extensions that are compiled after installation: there is nothing to do.")
