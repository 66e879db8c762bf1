"""Devices of the kind `opencl`: opencl:0, opencl:1, ... are all devices of all OpenCL platforms, in the loader's order."""

from pathlib import Path


def library() -> str:
    """The absolute path of the backend's library. The library itself says at `open` if there is no OpenCL."""
    folder = Path(__file__).parent.absolute()
    paths = sorted(folder.glob("_opencl*.so"))
    if not paths:
        raise FileNotFoundError(f"no _opencl*.so in {folder}; install the package instead of running it from its source")
    return str(paths[0])
