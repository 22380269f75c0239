# nmt with the versions of constraints.txt, run by a user without rights. docs/quickstart.md shows how to use it.
ARG BASE=python:3.12-slim
FROM ${BASE}
# Where torch comes from: its CPU build, or https://pypi.org/simple for the CUDA build.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# Images without Python, such as those of CUDA, get their distribution's.
RUN command -v python3 > /dev/null || { apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/nmt
ENV PATH=/opt/nmt/bin:${PATH} PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# The steps of the Makefile. The package comes last: a change of the code installs nothing else again.
WORKDIR /opt/nmt/src
COPY constraints.txt ./
RUN awk '/^setuptools==/, !/\\$/' constraints.txt | pip install --require-hashes --no-deps -r /dev/stdin
RUN grep -v '^torch==' constraints.txt | pip install --require-hashes --no-deps --no-build-isolation -r /dev/stdin
RUN pip install --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY nmt nmt
COPY configs configs
RUN pip install --no-deps --no-build-isolation . && pip check

RUN useradd --create-home nmt && install --directory --owner=nmt /work
# By name, so that the image also works for a user whose number it does not know (docker run --user).
ENV HOME=/home/nmt USER=nmt
USER nmt
WORKDIR /work
CMD ["nmt-train"]
