// Package lint checks the house rules on the source of kvgate itself: which package may import which, that packages and
// exported names are documented, that no machine's paths or secrets are in tracked files, and that documents agree with
// the program. It has no code of its own besides its tests, and nothing may import it.
package lint
