"""Package metadata. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

# TensorFlow comes under several distribution names (tensorflow, tensorflow-cpu, nightly builds),
# none of which counts as another one for pip. Requiring one would install a second copy over the
# files of the first, so a flavour is only ever installed when an extra asks for it.
INSTALL_REQUIRES = ["keras>=3.15,<4", "numpy", "absl-py"]

TENSORFLOW = ">=2.21,<2.22"
LINUX_X86 = 'sys_platform == "linux" and platform_machine == "x86_64"'
NOT_LINUX_X86 = 'sys_platform != "linux" or platform_machine != "x86_64"'

EXTRAS = {
    "cpu": [
        f"tensorflow-cpu{TENSORFLOW}; {LINUX_X86}",
        f"tensorflow{TENSORFLOW}; {NOT_LINUX_X86}",
    ],
    "gpu": [f"tensorflow[and-cuda]{TENSORFLOW}"],
    "tensorboard": ["tensorboard"],
    "plot": ["matplotlib"],
    "examples": ["scikit-learn"],
    # Rows come as Arrow batches; DataFrames want pandas for what is vectorised, and warn
    # of pandas 3 (pyspark 4.3).
    "spark": ["pyspark>=4,<5", "pyarrow>=15", "pandas>=2.2,<3"],
    "test": [
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "scipy",
        "hypothesis",
        "psutil",
        "scikit-learn",
        "tensorboard",
        "matplotlib",
    ],
    "lint": ["ruff==0.17.*", "mypy>=1.13"],
    "docs": ["sphinx>=8", "docutils>=0.22", "myst-parser>=5.1", "furo"],
}
# No TensorFlow here either: `pip install -e ".[cpu,dev]"` names the flavour.
EXTRAS["dev"] = sorted(
    {
        requirement
        for extra in ("tensorboard", "plot", "examples", "test", "lint", "docs")
        for requirement in EXTRAS[extra]
    }
)

setup(
    name="tf_dsgd",
    version="0.1.0",
    description="Asynchronous distributed SGD for Keras 3 models on TensorFlow, through plain fit.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["tf_dsgd", "tf_dsgd.*"]),
    package_data={"tf_dsgd": ["py.typed"]},
    entry_points={"console_scripts": ["tf-dsgd = tf_dsgd.__main__:main"]},
    python_requires=">=3.11",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    # Bazel's BUILD and setuptools' default build/ are one name where case does not count.
    options={"build": {"build_base": ".build"}},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
