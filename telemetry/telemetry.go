// Package telemetry is what kvgate reports about itself: its metrics, on a Prometheus registry of its own, and one log
// line per request. Every name that leaves the process in a metric or a log field is in names.go.
//
// It may import pool, to show the table at the moment it is scraped; it must not import proxy, admin or any network
// package of ours: those call it.
package telemetry
