//go:build linux && !race

package proxybench_test

const raceEnabled = false
