# make serve ARGS="-m model.gguf"   a server on 127.0.0.1:8080
# make serve MODEL=smollm2          with a small real chat model, fetched once (93 MB)
# make serve LLAMA=vulkan           a build of llama.cpp for a card: auto, cpu, vulkan, cuda, cuda12 (docs/gpu.md)
# make launch CLIENT=claude         a coding agent with a server of its own (docs/launch.md)
# make check                        lint, types and the quick half of the tests
# make test                         the whole suite, in two processes (PROCESSES=0: in one)
# make client-test                  the clients and programs of others (docs/clients.md names them) against a server
# make scale-test                   two replicas on Ray Serve: placement, conversations, a replica that is killed
# make device-test                  the tests of the cache on devices that are not the CPU: llama.cpp's RPC, Vulkan in software
# make page-test                    the page, in Debian's Chromium (apt-get install chromium npm)
# make mutations                    10,000 damaged files: no wrong token is ever restored, and no crash
# make endurance                    faults, rude clients, 2,000 half-open connections, mixed load, 17 minutes: nobody else is hurt
# make coverage                     the whole suite again, and the share of lines that it runs
# make lint                         ruff and pyright
# make audit                        known holes in what is installed, and in the oldest versions that pyproject.toml admits
# make house                        how often each rule of the house is broken, and where
# make fuzz CASES=420               requests made from /openapi.json of a server that runs: 5,000 in all, none may be a 5xx
# make wheel                        the package as a wheel, in dist/; it has no compiled code
# make wheel-test                   that wheel in an empty environment with a prebuilt llama.cpp: it serves
# make native                       a llama.cpp compiled for this machine, instead of a prebuilt one
# Each first makes its own set-up: a virtual environment in .venv, the dependencies, and llama.cpp. `serve` takes a prebuilt one,
# for a card if there is one, unless one was compiled before; all others compile llama-cpp-python (6 minutes on 2 cores, once).
# docs/gpu.md has more on cards, and on CMAKE_ARGS and ENGINE_INDEX.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
MODEL :=
CLIENT ?= claude
PROCESSES ?= 2
# Each file in one process, in the order of the folders: those of few tests, some of which are long, are not the last ones.
SHARED := --dist loadfile --no-loadscope-reorder
LLAMA ?=
ASKED = $(or $(LLAMA),$(patsubst $(VENV)/.llama-%,%,$(wildcard $(VENV)/.llama-*)))
URL ?= http://127.0.0.1:8080
CASES ?= 420
ENGINE_INDEX ?=
HOLES ?= https://api.osv.dev/v1/query
ROOMS := server slots ordering retrieval models front
DEVICE := build/device
DEVICE_TESTS ?= tests/device tests/slots tests/models tests/server
VULKAN_TESTS ?= tests/device $(patsubst %,tests/models/test_%.py,draft_model exactness host interrupt multi_token rotation \
	separate snapshots window) tests/server/engine/test_sleep.py
QUICK ?= tests/test_house.py tests/test_habits.py tests/docs/test_api.py $(patsubst %,tests/docs/test_%.py,architecture generated links numbers readme) \
	tests/ordering tests/slots tests/server/config tests/server/formats tests/server/test_command_line.py
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
BIN := $(VENV)/bin
AXE := axe-core@4.14.1
PROGRAMS := aider-chat==0.86.2 guidellm==0.8.1 llm==0.36
ENGINE := $(shell sed -n 's/.*"\(llama-cpp-python==[^"]*\)".*/\1/p' pyproject.toml)
PREBUILT := $(shell sed -n 's/.*"\(xllamacpp==[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: serve launch check test coverage client-test scale-test device-test rpc-test vulkan-test page-test mutations endurance lint audit \
	house fuzz install native wheel wheel-test clean

serve: $(VENV)/.serving
	$(BIN)/slotcache serve $(if $(MODEL),-m $(MODEL)) $(ARGS)

launch: $(VENV)/.serving
	$(BIN)/slotcache launch $(CLIENT) $(if $(MODEL),-m $(MODEL)) $(ARGS)

check: lint
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) $(SHARED) $(QUICK) $(ARGS)

test: $(VENV)/.developing
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) $(SHARED) $(ARGS)

coverage: $(VENV)/.developing
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) $(SHARED) $(foreach room,$(ROOMS),--cov $(room)) $(ARGS)

# The clients leave event loops open.
client-test: $(VENV)/.clients $(VENV)/.openai-3 $(VENV)/.programs
	$(VENV)/openai-3/bin/python -m pytest -W ignore::ResourceWarning tests/clients/test_frameworks.py \
		tests/clients/test_opt_in.py $(ARGS)
	$(VENV)/clients/bin/python -m pytest -W ignore::ResourceWarning tests/clients $(ARGS)

# The clients' environments, for either version of OpenAI's package, stand on the other one: they see the server's packages,
# and this checkout, and their own come first. Their pip is a new one: that of Python 3.11 finds no versions that fit together.
$(VENV)/.clients $(VENV)/.openai-3: $(VENV)/.%: $(VENV)/.developing
	$(PYTHON) -m venv $(VENV)/$*
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VENV)/$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/server.pth"
	$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras["$*"], sep="\n")' > $(VENV)/$*/requirements.txt
	$(VENV)/$*/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/$*/bin/pip install --quiet --requirement $(VENV)/$*/requirements.txt
	@touch $@

# Each program in an environment of its own: their dependencies do not fit together. What cannot be installed is skipped.
$(VENV)/.programs: tests/clients/package.json
	@mkdir -p $(VENV)/programs/node
	@for program in $(PROGRAMS); do \
		name=$(VENV)/programs/$${program%%=*}; \
		$(PYTHON) -m venv $$name && $$name/bin/pip install --quiet "$$program" || echo "not installed: $$program"; \
	done
	@cp $< $(VENV)/programs/node
	@npm install --prefix $(VENV)/programs/node --no-audit --no-fund --silent || echo "not installed: what npm has"
	@touch $@

scale-test: $(VENV)/.ray
	$(VENV)/ray/bin/python -m pytest -W ignore tests/scale $(ARGS)

# As for the clients.
$(VENV)/.ray: $(VENV)/.developing
	$(PYTHON) -m venv $(VENV)/ray
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VENV)/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/server.pth"
	$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras["ray"], sep="\n")' > $(VENV)/ray/requirements.txt
	$(VENV)/ray/bin/pip install --quiet --requirement $(VENV)/ray/requirements.txt
	@touch $@

device-test: rpc-test vulkan-test

rpc-test: $(VENV)/.developing $(DEVICE)/plugin.so
	$(BIN)/python tests/device/run.py rpc $(BIN)/python -m pytest --numprocesses $(PROCESSES) $(SHARED) $(DEVICE_TESTS) $(ARGS)
	$(BIN)/python tests/device/run.py rpc2 $(BIN)/python -m pytest tests/device/test_two_devices.py

# Vulkan's device in software, where Mesa has brought its driver.
vulkan-test: $(VENV)/.developing
	@if ! ls /usr/share/vulkan/icd.d/lvp_icd*.json > /dev/null 2>&1 || ! command -v npm > /dev/null; then \
		echo "not tested on Vulkan, which needs a driver in software and npm: apt-get install mesa-vulkan-drivers npm"; \
	else \
		$(MAKE) $(DEVICE)/vulkan/.fetched && $(BIN)/python tests/device/run.py vulkan $(BIN)/python -m pytest \
			--numprocesses $(PROCESSES) $(SHARED) $(VULKAN_TESTS) $(ARGS); \
	fi

$(DEVICE)/vulkan/.fetched: prebuilt/vulkan/package-lock.json
	@echo "fetching npm's Vulkan build of llama.cpp (24 MB)"
	@mkdir -p $(@D) && cp prebuilt/vulkan/*.json $(@D)
	@npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund --silent
	@touch $@

# The sources of the installed llama-cpp-python. Its own build has no RPC backend.
$(DEVICE)/$(ENGINE)/.unpacked: | $(VENV)/.engine
	@command -v cmake cc > /dev/null || { echo "device-test needs a C compiler and CMake: apt-get install cmake g++"; exit 1; }
	@echo "fetching the sources of $(ENGINE) (76 MB)"
	@mkdir -p $(@D)
	@$(BIN)/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(@D) $(ENGINE)
	@tar xzf $(@D)/llama_cpp_python-*.tar.gz -C $(@D) --strip-components=1
	@touch $@

$(DEVICE)/llama/bin/libggml-rpc.so: $(DEVICE)/$(ENGINE)/.unpacked
	@echo "building llama.cpp with a device in another process, in $(DEVICE)"
	@cmake -S $(<D)/vendor/llama.cpp -B $(DEVICE)/llama -DCMAKE_BUILD_TYPE=Release -DGGML_RPC=ON -DBUILD_SHARED_LIBS=ON \
		-DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF \
		$(foreach part,TESTS EXAMPLES TOOLS SERVER COMMON APP,-DLLAMA_BUILD_$(part)=OFF) > $(DEVICE)/build.log 2>&1 \
		|| { tail -n 40 $(DEVICE)/build.log; exit 1; }
	@cmake --build $(DEVICE)/llama --parallel $(JOBS) --target llama ggml-rpc >> $(DEVICE)/build.log 2>&1 & $(call watch,$(DEVICE)/build.log)
	@touch $@

$(DEVICE)/plugin.so: tests/device/plugin.c $(DEVICE)/llama/bin/libggml-rpc.so
	cc -O1 -Wall -Wextra -Werror -shared -fPIC -o $@ $< -L$(DEVICE)/llama/bin -lggml-rpc -lggml -Wl,-rpath,$(abspath $(DEVICE))/llama/bin

page-test: $(VENV)/.page
	$(VENV)/page/bin/python -m pytest tests/page $(ARGS)

# As for the clients. The browser is Debian's: Playwright's own are no packages of a registry.
$(VENV)/.page: $(VENV)/.developing
	@command -v chromium npm > /dev/null || { echo "page-test needs chromium and npm: apt-get install chromium npm"; exit 1; }
	$(PYTHON) -m venv $(VENV)/page
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
		> "$$($(VENV)/page/bin/python -c 'import site; print(site.getsitepackages()[0])')/server.pth"
	$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
		print(*extras["page"], sep="\n")' > $(VENV)/page/requirements.txt
	$(VENV)/page/bin/pip install --quiet --requirement $(VENV)/page/requirements.txt
	cd $(VENV)/page && tar xzf "$$(npm pack --silent $(AXE))" package/axe.min.js
	@touch $@

mutations: $(VENV)/.developing
	SLOTCACHE_MUTATIONS=$(or $(MUTATIONS),10000) $(BIN)/python -m pytest --numprocesses $(PROCESSES) $(SHARED) \
		tests/slots/test_mutated_records.py tests/server/engine/test_mutated_files.py tests/models/test_mutated_models.py $(ARGS)

endurance: $(VENV)/.developing
	$(BIN)/slotcache bench endurance $(ARGS)

lint: $(VENV)/.developing build/types/slotcache
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

build/types/slotcache:  # the package `slotcache`, for pyright: it cannot follow an editable install
	mkdir -p build/types
	ln -s ../.. $@

# Each of the two is audited, also if the other has a hole. Where the index cannot be had, pip-audit ends with a traceback.
audit: $(VENV)/.auditing
	@$(BIN)/python -c 'import re, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		asked = project["dependencies"] + sum(project["optional-dependencies"].values(), []); \
		print(*sorted({re.sub(r"([\w-]+)(\[.*\])?(>=|~=|==)([\w.]+).*", r"\1==\4", one) for one in asked}), sep="\n")' \
		> $(VENV)/audit/oldest.txt
	@ended=0; \
	for asked in "--skip-editable --path $$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')" \
		"--no-deps --disable-pip --requirement $(VENV)/audit/oldest.txt"; do \
		$(VENV)/audit/bin/pip-audit --vulnerability-service osv --osv-url $(HOLES) --progress-spinner off $$asked \
			2> $(VENV)/audit/log || ended=1; \
		if grep -q '^Traceback' $(VENV)/audit/log; then \
			echo "no audit: the index of holes, $(HOLES), cannot be had here"; exit 1; \
		fi; \
		tail -n 1 $(VENV)/audit/log; \
	done; exit $$ended

$(VENV)/.auditing: $(VENV)/.developing
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip install --quiet 'pip-audit>=2.10,<3'
	@touch $@

house:
	$(PYTHON) tests/test_house.py -v

fuzz: $(VENV)/.fuzzing
	$(VENV)/fuzz/bin/schemathesis run $(URL)/openapi.json --checks not_a_server_error --phases examples,coverage,fuzzing \
		--max-examples $(CASES) --workers 2 --request-timeout 30 --continue-on-failure --generation-database none \
		--suppress-health-check all

$(VENV)/.fuzzing: $(VENV)/.engine
	$(PYTHON) -m venv $(VENV)/fuzz
	$(VENV)/fuzz/bin/pip install --quiet 'schemathesis>=4.32,<5'
	@touch $@

install: $(VENV)/.installed

native: install

# Behind a build in the background: its steps as they count up in its log, and the end of the log where it fails.
define watch
pid=$$!; \
	trap 'kill $$pid' INT TERM; \
	while kill -0 $$pid 2>/dev/null; do \
		sleep 5; step=$$(grep -oE '\[ *[0-9]+(/[0-9]+|%)\]' $(1) | tail -n 1); \
		[ "$$step" = "$$last" ] || echo "  llama.cpp $$step"; last=$$step; \
	done; \
	wait $$pid || { tail -n 40 $(1); exit 1; }
endef
define compile
echo "installing llama.cpp: a build from source takes some minutes, its steps count up below"; \
	$(BIN)/pip install --verbose $(ENGINE) $(WHEELS) > $(VENV)/engine.log 2>&1 & $(call watch,$(VENV)/engine.log); \
	touch $(VENV)/.engine
endef
WHEELS := $(if $(ENGINE_INDEX),--only-binary llama-cpp-python --extra-index-url $(ENGINE_INDEX))

# What was fetched for a card stays beside, and is not used before it is asked for again.
forget_builds = test ! -d $(VENV)/llama.cpp || echo '{"asked": "", "builds": [], "passed_over": {}}' > $(VENV)/llama.cpp/installed.json

# For `serve`, the fastest llama.cpp that is there in seconds: one compiled for this machine, now or before, if it is in the
# environment; npm's for a card, if there is one or LLAMA names it; one compiled before that is in pip's cache; npm's for CPUs, which
# has code for each generation; xllamacpp's, made for AVX2. Without LLAMA, what was asked for before stays.
$(VENV)/.serving: pyproject.toml $(wildcard prebuilt/*/package-lock.json) $(if $(LLAMA),$(VENV)/.llama-$(LLAMA))
	$(check_python)
	@test -e $(VENV)/.engine || $(PYTHON) -m venv $(VENV)
	@$(forget_builds)
	@builds=cpu; \
	if test -z "$(CMAKE_ARGS)$(ENGINE_INDEX)" && { test -n "$(ASKED)" || test ! -e $(VENV)/.engine; }; then \
		builds=$$($(PYTHON) models/cards.py $(or $(ASKED),auto) $(VENV)/lib/python*/site-packages) || exit 1; \
	fi; \
	if test "$${builds:-cpu}" != cpu && $(BIN)/pip install --quiet --editable '.[hf]' \
		&& $(BIN)/slotcache install $(or $(ASKED),auto); then \
		:; \
	elif test -e $(VENV)/.engine; then \
		echo "llama.cpp: compiled for this machine"; \
	elif test -n "$(CMAKE_ARGS)$(ENGINE_INDEX)" \
		|| $(BIN)/pip cache list "$(subst ==,-,$(subst -,_,$(ENGINE)))" 2> /dev/null | grep -q whl; then \
		$(compile); echo "llama.cpp: compiled for this machine"; \
	elif test "$$(uname -sm)" = "Linux x86_64" && command -v npm > /dev/null && mkdir -p $(VENV)/llama.cpp/cpu \
		&& cp prebuilt/cpu/*.json $(VENV)/llama.cpp/cpu \
		&& npm ci --prefix $(VENV)/llama.cpp/cpu --ignore-scripts --no-audit --no-fund --silent; then \
		echo "llama.cpp: npm's build, with code for this CPU; make native compiles one for this machine"; \
	elif $(BIN)/pip install --quiet --only-binary xllamacpp $(PREBUILT); then \
		echo "llama.cpp: xllamacpp's build for AVX2; npm's is faster (apt-get install npm), or one of make native"; \
	else \
		echo "no llama.cpp: make native (with cmake and g++), apt-get install npm, or pip install $(PREBUILT)"; exit 1; \
	fi
	$(BIN)/pip install --quiet --editable '.[hf]'
	@touch $@

$(VENV)/.llama-%:
	$(check_python)
	@test $* = auto || $(PYTHON) models/cards.py $* > /dev/null
	@mkdir -p $(VENV)
	@rm -f $(VENV)/.llama-*
	@touch $@

define check_python
@$(PYTHON) -c 'import sys; sys.exit("slotcache needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
endef

$(VENV)/.engine:
	$(check_python)
	$(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.llama-*; $(forget_builds)
	@$(compile)

$(VENV)/.installed: $(VENV)/.engine pyproject.toml
	$(BIN)/pip install --quiet --editable '.[hf]'
	@touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[hf,bench,dev]'
	$(BIN)/pip install --quiet --editable '.[ann]' || echo "no faiss for this machine: the tests of clusters are skipped"
	@touch $@

wheel:
	$(check_python)
	rm -rf build/lib dist  # setuptools packs what an earlier build left there, and with it modules that are gone
	$(PYTHON) -m venv --clear build/wheel
	build/wheel/bin/pip wheel --quiet --no-deps --wheel-dir dist .

wheel-test: wheel
	build/wheel/bin/pip install --quiet --only-binary :all: "$$(ls dist/*.whl)[prebuilt]"
	build/wheel/bin/python -I tests/wheel.py

clean:
	rm -rf $(VENV) build dist *.egg-info
