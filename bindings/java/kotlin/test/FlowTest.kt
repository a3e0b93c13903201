import java.io.File
import kotlinx.coroutines.*
import kotlinx.coroutines.flow.*
import thimble.*

/** Reads and answers through flows, whole and cancelled, and compares with the sequence: MODEL.gguf TEXT.txt */
fun main(arguments: Array<String>) {
    val settings = options {
        budgetBytes = 64L shl 20
        retention = Thimble.RETENTION_WINDOW
        pool = 256
        chunk = CHUNK
    }
    Model.open(File(arguments[0]).toPath()).use { model ->
        val tokens = model.prompt(File(arguments[1]).readText())
        val pieces = model.session(settings).use { session ->
            session.feed(tokens)
            session.answer(ANSWER).toList()
        }
        model.session(settings).use { session -> runBlocking { collectsWhatTheSequenceGives(session, tokens, pieces) } }
        model.session(settings).use { session -> runBlocking { goesOnAfterACancellation(session, tokens, pieces) } }
    }
}

private const val CHUNK = 64
private const val ANSWER = 24
private const val PIECE = 2048

private suspend fun collectsWhatTheSequenceGives(session: Session, tokens: IntArray, pieces: List<String>) {
    val caller = Thread.currentThread()
    val fed = session.reading(tokens, PIECE).toList { same("the collector's thread", caller, Thread.currentThread()) }
    same("progress", (PIECE until tokens.size step PIECE).toList() + tokens.size, fed)
    same("answer", pieces, session.answers(ANSWER).toList())
}

private suspend fun goesOnAfterACancellation(session: Session, tokens: IntArray, pieces: List<String>) {
    // While the second piece is read, which takes some hundred milliseconds.
    val reading = session.reading(tokens, PIECE)
    val started = CompletableDeferred<Unit>()
    val job = GlobalScope.launch { reading.toList { started.complete(Unit) } }
    started.await()
    delay(20)
    job.cancelAndJoin()
    val read = session.stats().prefillTokens
    check(read < 2 * PIECE - 4 * CHUNK) { "$read tokens were read in spite of the cancellation" }
    same("progress after it", (2 * PIECE until tokens.size step PIECE).toList() + tokens.size, reading.toList())

    // A pending interrupt from another caller does not affect a flow.
    session.interrupt()
    val begun = ArrayList<String>()
    val answering = GlobalScope.launch { session.answers(ANSWER).toList { begun.add(it); if (begun.size == 3) throw CancellationException() } }
    answering.join()
    same("begun", 3, begun.size)
    same("answer in two", pieces, begun + session.answers(ANSWER - 3).toList())
}

private suspend fun <T> Flow<T>.toList(each: (T) -> Unit = {}): List<T> {
    val list = ArrayList<T>()
    collect(object : FlowCollector<T> {
        override suspend fun emit(value: T) {
            each(value)
            list.add(value)
        }
    })
    return list
}

private fun same(what: String, expected: Any, found: Any) = check(expected == found) { "$what: $found instead of $expected" }
