// Package soak runs kvgate as a process of its own before three simulated model servers, each a process too, that are
// killed, stopped, reset, frozen and restarted while many clients ask, leave and read. What happens to the servers and
// what the clients ask for follows from a seed. It is a test only; make soak runs it for ten minutes.
package soak
