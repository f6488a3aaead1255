// Package packaging tests what is in deploy: the Helm chart is linted and rendered with Helm's own library, and its plain
// manifest kept in step; alerts and dashboard are read with Prometheus' own parser, and every metric they name must be one
// that kvgate exports. It is a module of its own because of these libraries; run it with make test-packaging. The rendered
// manifests in testdata are those that test/kubernetes hands to a real API server.
package packaging
