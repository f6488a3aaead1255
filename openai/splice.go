package openai

// SpliceModel appends body to dst with the model's value replaced by name and
// every other byte as it was. r is what Peek or PeekMultipart found in body, which
// has a model. In JSON, name is quoted and escaped; its invalid UTF-8 becomes
// U+FFFD. In a form it is written as it is: it must not contain a line end. dst
// must not share memory with body.
func SpliceModel(dst, body []byte, r *Facts, name string) []byte {
	g := r.ModelRange
	dst = append(dst, body[:g.Start]...)
	if r.multipart {
		dst = append(dst, name...)
	} else {
		dst = appendQuoted(dst, name)
	}
	return append(dst, body[g.End:]...)
}

// SpliceIncludeUsage appends body to dst with stream_options.include_usage set to
// true and every other byte as it was. r is what Peek found in body. dst must not
// share memory with body.
func SpliceIncludeUsage(dst, body []byte, r *Facts) []byte {
	cut, text := includeUsage(body, r)
	dst = append(dst, body[:cut.Start]...)
	dst = append(dst, text...)
	return append(dst, body[cut.End:]...)
}

// SpliceModelIncludeUsage does what SpliceModel and SpliceIncludeUsage do, at
// once.
func SpliceModelIncludeUsage(dst, body []byte, r *Facts, name string) []byte {
	cut, text := includeUsage(body, r)
	g := r.ModelRange
	if cut.Start < g.Start {
		dst = append(dst, body[:cut.Start]...)
		dst = append(dst, text...)
		dst = append(dst, body[cut.End:g.Start]...)
		dst = appendQuoted(dst, name)
		return append(dst, body[g.End:]...)
	}
	dst = append(dst, body[:g.Start]...)
	dst = appendQuoted(dst, name)
	dst = append(dst, body[g.End:cut.Start]...)
	dst = append(dst, text...)
	return append(dst, body[cut.End:]...)
}

// includeUsage says what to replace so that include_usage is true.
func includeUsage(body []byte, r *Facts) (cut Range, text string) {
	switch {
	case r.IncludeUsageRange.Len() > 0:
		return r.IncludeUsageRange, "true"
	case r.StreamOptionsRange.Len() > 0:
		at := r.StreamOptionsRange.Start + 1
		if body[skipSpace(body, at)] == '}' {
			return Range{at, at}, `"include_usage":true`
		}
		return Range{at, at}, `"include_usage":true,`
	case r.streamOptionsNull.Len() > 0:
		return r.streamOptionsNull, `{"include_usage":true}`
	}
	// A body that was peeked at without error isn't empty: it has a model.
	return Range{r.bodyEnd, r.bodyEnd}, `,"stream_options":{"include_usage":true}`
}
