# Entry points of keepd. `make help` lists them; CMake and tools/ do the work.
#
#   make serve                      first run on a fresh machine
#   make serve ARGS="--port 9000"   options for the daemon (build/keepd --help)
#   make serve MODEL=smollm2        a small real model, fetched on the first use (tools/fetch-model)
#   make serve MODEL=/path/to/model another one: a directory or a GGUF file
.DEFAULT_GOAL := help
.PHONY: help serve build install package package-arm64 package-test image image-test gpu-test test check lint format fuzz mutants load scale bench quality clean

MODEL ?= bundled/keepd-nano
ARGS ?=
FUZZ_SECONDS ?= 30
# --no-build: the rehearsal of bench/gpu/check in another distribution does not build the programs there once more.
GPU_REHEARSAL ?=
SECONDS ?= 15
PREFIX ?= /usr/local
# CPU paths of the daemon: native (of this processor: compiles in a third of the time) or all (for other machines).
CPU_PATHS ?= native
DESTDIR ?=
# The package for this processor.
DEB = build/keepd_*_$$(dpkg --print-architecture).deb

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

serve: ## install missing packages, build, start the daemon with the bundled model
	@tools/install-deps serve
	@$(MAKE) --no-print-directory build
	@model=$$(tools/fetch-model "$(MODEL)") && gates=$$(tools/fetch-model --gates "$(MODEL)") && \
		names=$${KEEPD_SERVED_MODEL_NAME:-$$(tools/fetch-model --names "$(MODEL)")} && \
		options=$$(tools/fetch-model --options "$(MODEL)") && \
		exec env $${names:+"KEEPD_SERVED_MODEL_NAME=$$names"} build/keepd --model "$$model" $${gates:+--gates "$$gates"} $$options $(ARGS)

build: ## build the release binary: build/keepd (CPU_PATHS=all: for other processors, too)
	@tools/build release -DKEEPD_CPU_PATHS="$(CPU_PATHS)" keepd
	@ln -sf release/server/keepd build/keepd

install: ## as root: install daemon, manual page, systemd units and bundled model under DESTDIR and PREFIX (/usr/local)
	@$(MAKE) --no-print-directory build CPU_PATHS=all
	@cmake -B build/release -DCMAKE_INSTALL_PREFIX=$(PREFIX) >/dev/null
	@cmake --build build/release --target keepd keepd_texts -- --quiet
	@DESTDIR=$(DESTDIR) cmake --install build/release

package: ## build a Debian package: build/keepd_VERSION_ARCHITECTURE.deb
	@$(MAKE) --no-print-directory build CPU_PATHS=all
	@cmake -B build/release -DCMAKE_INSTALL_PREFIX=/usr >/dev/null
	@cmake --build build/release --target keepd keepd_texts -- --quiet
	@cd build && cpack -G DEB --config release/CPackConfig.cmake -B . >package.log || { cat package.log; exit 1; }
	@ls $(DEB)

# Debian's library packages have the same names for every processor, so the package for this one says which are needed.
package-arm64: ## the same for ARM64, compiled here: build/keepd_VERSION_arm64.deb
	@ls $(DEB) >/dev/null 2>&1 || $(MAKE) --no-print-directory package
	@tools/install-deps arm64
	@tools/arm64-root
	@tools/build arm64 -DCMAKE_INSTALL_PREFIX=/usr keepd keepd_texts
	@cd build && cpack -G DEB --config arm64/CPackConfig.cmake -B . -D CPACK_DEBIAN_PACKAGE_ARCHITECTURE=arm64 \
		-D CPACK_DEBIAN_PACKAGE_SHLIBDEPS=OFF \
		-D CPACK_DEBIAN_PACKAGE_DEPENDS="$$(dpkg-deb -f "$$(ls -t ../$(DEB) | head -1)" Depends)" >package-arm64.log || \
		{ cat package-arm64.log; exit 1; }
	@ls build/keepd_*_arm64.deb

test: ## install missing packages, build, run the tests, with sanitizers for all but the kernels (minutes)
	@tools/install-deps test
	@rm -rf build/results
	@tools/build test
	@tools/run_ctest test -LE long
	@SUITES=tests/http KEEPD_BIN=build/test/server/keepd-fake tools/run_pytest quick -m "not slow"
	@SUITES=tests/e2e/test_dialogue.py KEEPD_BIN=build/test/server/keepd tools/run_pytest quick -m "not slow"
	@tools/totals --slowest 10

# Stages of `make check`, some of which compute while others wait. They build what no other stage needs. Load and scale
# come after them, because a program that computes would slow them down. Both mostly wait, so these two run together.
STAGES := clients kernels arm64 package gpu python long slow tsan agents fuzz training
STORMS := load scale
STAGES_AT_ONCE ?= 3

check: ## run everything that `make test` omits: kernels with sanitizers, thread sanitizer, fuzzers, long suites, style (under an hour)
	@tools/install-deps check
	@tools/install-deps package
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory package # and with it build/keepd, for other processors, too
	@tools/build release keepd-fake load
	@tools/build dev check_programs
	@$(MAKE) --no-print-directory -j$(STAGES_AT_ONCE) $(STAGES:%=check-%)
	@$(MAKE) --no-print-directory -j2 $(STORMS:%=check-%)

check-%: SHELL := /bin/bash
check-%: # lines of stages that run at once bear their names
	@set -o pipefail; TIMEFORMAT="$*: took %0R s, %0U s of CPU and %0S s in the kernel"; \
		time $(MAKE) --no-print-directory stage-$* 2>&1 | sed -u 's/^/$*: /'

stage-long: # without sanitizers; the tests without this label ran with sanitizers in `make test`
	@tools/run_ctest dev -L long

stage-python:
	@SUITES="tests/python tests/e2e tests/http/test_cuda.py" tools/run_pytest dev -m "not slow"

stage-slow:
	@tools/run_pytest slow -m slow

# With sanitizers, on all paths that this processor can run. Floods of requests take minutes there, and call no kernel that
# sim_sched does not call: they run in the build that has plain kernels.
stage-kernels:
	@tools/build asan kernel_tests
	@tools/run_ctest asan -L kernels -LE plain
	@tools/build test sim_fair sim_tenants
	@tools/run_ctest test -R '^sim_(fair|tenants)$$'

stage-arm64: # in an emulator; ARM64=required: fails where there is none
	@python3 tests/arm64/run.py $(ARM64)

stage-tsan:
	@tools/build tsan tsan_tests keepd-fake
	@tools/run_ctest tsan -L tsan
	@SUITES="tests/http/test_load.py tests/http/test_disconnect.py tests/http/test_conversations.py tests/http/test_resume.py" \
		KEEPD_BIN=build/tsan/server/keepd-fake tools/run_pytest tsan

stage-fuzz:
	@tools/run_fuzz $(FUZZ_SECONDS)

stage-clients:
	@tools/run_clients

stage-agents:
	@tools/run_agents

stage-training:
	@tools/run_training

stage-package: # `make package-test image-test` of the package that is built
	@python3 tests/package/run.py $(DEB)
	@python3 tools/image $(DEB) build/keepd-image.tar
	@python3 tests/package/image.py build/keepd-image.tar

stage-gpu: # the cases run in stage-long
	@CCACHE_NOHASHDIR=1 python3 tests/package/gpu.py --parts smoke,model,kernels,serve,chat $(GPU_REHEARSAL)

stage-load:
	@python3 tests/load/run.py $(SECONDS)

stage-scale:
	@python3 tests/scale/run.py --sessions 80 --turns 4 --clients 8 --pause 0.5

lint: ## check formatting, include directions, function lengths, words; run clang-tidy
	@tools/install-deps check
	@mkdir -p build && cmake --preset dev >build/dev.log # for compile_commands.json
	@tools/lint

format: ## format C and CUDA files with clang-format
	@git ls-files -z '*.c' '*.h' '*.cu' '*.cuh' '*.cc' | xargs -0 clang-format -i

fuzz: ## run every fuzzer for FUZZ_SECONDS (30)
	@tools/install-deps check
	@tools/run_fuzz $(FUZZ_SECONDS)

mutants: ## try changes of the sources that tests must catch (tests/mutants; half an hour; ARGS="--only text": some of them)
	@tools/install-deps test
	@"$$(tools/venv)/bin/python" tests/mutants/run.py $(ARGS)

package-test: ## install the package in a clean Debian root, use, upgrade and purge it
	@tools/install-deps package
	@$(MAKE) --no-print-directory package
	@python3 tests/package/run.py $(DEB)

image: ## build an OCI image, without a daemon: build/keepd-image.tar
	@tools/install-deps package
	@$(MAKE) --no-print-directory package
	@python3 tools/image $(DEB) build/keepd-image.tar

image-test: image ## check the image's layout, and use it: not as root, with its own libraries alone
	@python3 tests/package/image.py build/keepd-image.tar

gpu-test: ## rehearse bench/gpu/check in a clean root of another distribution, without a GPU (ten minutes)
	@tools/install-deps package
	@python3 tests/package/gpu.py $(ARGS)

load: ## clients of every kind at once, plain and over TLS, three minutes (SECONDS=600: ten each; MODE=tls: only TLS); fails on a leak or a lost answer
	@tools/install-deps test
	@tools/build release keepd keepd-fake load
	@python3 tests/load/run.py $(SECONDS) $(MODE)

scale: ## 200 multi-turn sessions through HAProxy, one daemon killed, one drained, one added (ARGS="--router smg": through that)
	@tools/install-deps scale
	@$(MAKE) --no-print-directory build
	@python3 tests/scale/run.py --json build/scale.json $(ARGS)

bench: ## measure this machine: bandwidth, prompt and generation rates
	@tools/install-deps test
	@$(MAKE) --no-print-directory build
	@tools/build release
	@"$$(tools/venv)/bin/python" bench/speed/speed.py $(ARGS)

quality: ## measure the answers of a bounded cache on synthetic tasks: bench/results/nano
	@tools/install-deps test
	@$(MAKE) --no-print-directory build
	@"$$(tools/venv)/bin/python" bench/quality/quality.py $(ARGS)

clean: ## remove build/ (the Python environment .venv stays)
	rm -rf build
