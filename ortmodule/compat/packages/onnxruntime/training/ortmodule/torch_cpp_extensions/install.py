"""Accepts ``python -m onnxruntime.training.ortmodule.torch_cpp_extensions.install``, and does nothing."""


def build_torch_cpp_extensions() -> None:
    print("ortmodule needs no extensions that are compiled after installation: there is nothing to do.")


if __name__ == "__main__":
    build_torch_cpp_extensions()
