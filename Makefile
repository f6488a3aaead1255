# Everything needs Go and nothing else, unless its line says so.
.DEFAULT_GOAL := help
export CGO_ENABLED ?= 0

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS := -s -w -X kvgate/internal/version.version=$(VERSION)
TOOL    := $(GO) tool -modfile=tools/go.mod
FUZZTIME ?= 20s
PKGS    ?= ./...

.PHONY: help
help: ## this list
	@grep -hE '^[a-z][a-z-]*:.*## ' Makefile | sed -E 's/:.*## /\t/' | while IFS="$$(printf '\t')" read -r t d; do printf '  make %-10s %s\n' "$$t" "$$d"; done

.PHONY: build
build: ## the binary ./kvgate
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o kvgate .

.PHONY: demo
demo: build ## four simulated GPU servers and kvgate: round robin against kvgate in under a minute
	./kvgate demo

.PHONY: test
test: ## all tests, without a C compiler
	$(GO) test $(TESTFLAGS) $(PKGS)

.PHONY: check
check: lint test ## lint and test: run it before you push

.PHONY: race
race: ## all tests under the race detector, in random order (needs a C compiler)
	CGO_ENABLED=1 $(GO) test -race -shuffle=on $(TESTFLAGS) $(PKGS)

.PHONY: test-kubernetes
test-kubernetes: build ## against a real Kubernetes API server, built once (needs etcd, and Linux with user namespaces)
	@command -v etcd >/dev/null || { echo "etcd is not installed: apt-get install etcd-server, or put an etcd 3.4 or newer into PATH"; exit 1; }
	cd test/kubernetes && $(GO) test -trimpath -count=1 -timeout 90m -v . -kvgate ../../kvgate

.PHONY: test-dashboard
test-dashboard: build ## the dashboard in a real browser, screenshots into dist/dashboard (needs chromium)
	cd test/dashboard && $(GO) test -count=1 -timeout 20m -v . -kvgate ../../kvgate -shots ../../dist/dashboard

.PHONY: test-packaging
test-packaging: build ## the chart, alerts and dashboard of deploy/ (TESTFLAGS=-update rewrites what is made from the chart)
	cd test/packaging && $(GO) test -trimpath -count=1 . $(TESTFLAGS)

.PHONY: test-tracing
test-tracing: build ## traces, as the OpenTelemetry Collector's own receiver understands them
	cd test/tracing && $(GO) test -trimpath -count=1 -timeout 10m . -kvgate ../../kvgate $(TESTFLAGS)

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (20s) each
	@set -e; for p in $$($(GO) list ./...); do \
	  for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	    echo "$$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) $$p; \
	  done; done

# SOAK is how long, SEED what happens: a run prints its own, for it to be seen again.
SOAK ?= 10m
SEED ?=

.PHONY: soak
soak: ## servers killed, stopped, reset and frozen at random under 200 clients, for SOAK (10m) from SEED (Linux)
	KVGATE_SOAK=$(SOAK) KVGATE_SOAK_SEED=$(SEED) $(GO) test -count=1 -timeout 0 -v -run '^TestSoak$$' $(TESTFLAGS) ./test/soak

.PHONY: bench
bench: build ## what kvgate costs beside nginx, HAProxy and small proxies, into dist/bench (half an hour; BENCH='--quick' for a minute)
	./kvgate bench proxy --strace --out dist/bench $(BENCH)

.PHONY: microbench
microbench: ## Go benchmarks, ten times each; compare two runs with benchstat
	$(GO) test -run '^$$' -bench . -benchmem -count 10 ./...

.PHONY: lint
lint: ## gofmt, gofumpt, vet, go fix, staticcheck
	@out=$$(git ls-files -z '*.go' | xargs -0 gofmt -l); if [ -n "$$out" ]; then echo "gofmt -w $$out"; exit 1; fi
	@out=$$(git ls-files -z '*.go' | xargs -0 $(TOOL) gofumpt -l); if [ -n "$$out" ]; then echo "gofumpt -w $$out"; exit 1; fi
	$(GO) vet ./...
	$(GO) fix -diff ./...
	$(TOOL) staticcheck ./...

.PHONY: generate
generate: ## documents and examples that are made from the program
	$(GO) test ./internal/lint -run 'Documented' -update
	$(GO) generate ./...

.PHONY: vuln
vuln: ## known vulnerabilities (needs the internet)
	$(GO) run golang.org/x/vuln/cmd/govulncheck@latest ./...

.PHONY: clean
clean: ## remove what was built
	rm -rf kvgate dist
