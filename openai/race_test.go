//go:build race

package openai

// stride thins out exhaustive tests that have nothing concurrent in them.
const stride = 13
