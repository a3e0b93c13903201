/** Kotlin over the Java classes: answers as sequences. */
package thimble

/**
 * The answer, piece by piece, until a token ends it or [limit] tokens were generated. Each piece is computed when it is
 * requested, in the requesting thread.
 */
fun Session.answer(limit: Int): Sequence<String> = generate(limit).asSequence().constrainOnce()

/** Options of a session: `options { budgetBytes = 64 shl 20; pool = 1024 }`. */
inline fun options(fill: Options.() -> Unit): Options = Options().apply(fill)

/** Token ids of a text, with BOS first if the model asks for it. */
fun Model.prompt(text: String): IntArray = tokenize(text, Thimble.TOKENIZE_ADD_BOS)
