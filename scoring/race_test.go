//go:build race

package scoring

// raceDetector makes big tests smaller.
const raceDetector = true
