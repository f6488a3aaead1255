// Package kubernetes tests kvgate as a process of its own against a real Kubernetes API server, with the manifests of
// deploy/rbac, the real EndpointSlice controller and simulated model servers. It is a module of its own, since a
// kube-apiserver takes hundreds of modules that kvgate itself must not need; run it with make test-kubernetes.
//
// Everything runs in a network namespace of its own: pods have addresses of their own there (Kubernetes refuses loopback
// addresses in EndpointSlices), and nothing of it can be reached from outside.
package kubernetes
