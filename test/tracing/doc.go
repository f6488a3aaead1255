// Package tracing tests that a collector of the OpenTelemetry project understands what kvgate sends it: its OTLP receiver
// runs here, the built binary sends it the spans of requests to simulated servers, and each span is looked at as the
// collector's own data model has it. It is a module of its own because of that library; run it with make test-tracing.
package tracing
