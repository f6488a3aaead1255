//go:build race

package soak

// race says that the race detector runs, whose own memory is several times the program's.
const race = true
