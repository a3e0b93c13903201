/** Kotlin's flows over the Java classes, with kotlinx.coroutines: long calls do not block the collector's thread. */
package thimble

import kotlin.coroutines.resume
import kotlin.coroutines.resumeWithException
import kotlinx.coroutines.*
import kotlinx.coroutines.flow.*

/**
 * The answer, piece by piece, until a token ends it or [limit] tokens were generated. Each piece is computed when the collector
 * requests it. A collector that is cancelled interrupts the session within the time of a token, or of one layer of a chunk
 * while it reads; collected again, the answer continues with at most [limit] further tokens, after a piece that was just
 * computed and not delivered.
 */
fun Session.answers(limit: Int): Flow<String> = flow<String> {
    val pieces = generate(limit).iterator()
    while (true) emit(aside { if (pieces.hasNext()) pieces.next() else null } ?: break)
}

/**
 * Feeds [tokens], [piece] at a time, and emits how many were fed so far. The division into pieces does not change where chunks
 * end. A collector that is cancelled interrupts the session within the time of one layer of a chunk; the same flow, collected
 * again, continues where it stopped.
 */
fun Session.reading(tokens: IntArray, piece: Int = 1024): Flow<Int> {
    require(piece > 0) { "a piece has at least one token" }
    var fed = 0
    return flow<Int> {
        while (fed < tokens.size) {
            val end = fed + minOf(piece, tokens.size - fed)
            aside {
                feed(tokens.copyOfRange(fed, end))
                fed = end
            }
            emit(end)
        }
    }
}

/**
 * A call in a thread that may block. Cancellation interrupts it, and returns after the call has returned. An interrupt that
 * comes just after its call has ended stops the next one, which is then repeated.
 */
private suspend fun <T> Session.aside(call: () -> T): T = withContext(Dispatchers.IO) {
    suspendCancellableCoroutine<T> { caller ->
        caller.invokeOnCancellation { interrupt() }
        caller.finish(call)
    }
}

private fun <T> CancellableContinuation<T>.finish(call: () -> T) {
    while (true) {
        try {
            return resume(call())
        } catch (error: Throwable) {
            val passedBy = error is ThimbleException && error.code == Thimble.INTERRUPTED && !isCancelled
            if (!passedBy) return resumeWithException(error)
        }
    }
}
