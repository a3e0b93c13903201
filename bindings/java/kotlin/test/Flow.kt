/**
 * The part of kotlinx.coroutines.flow that Flows.kt uses, with the published signatures, only for tests: Debian's
 * kotlinx.coroutines (1.0) has everything else, but no flows yet.
 */
package kotlinx.coroutines.flow

import kotlin.coroutines.coroutineContext

interface FlowCollector<in T> {
    suspend fun emit(value: T)
}

interface Flow<out T> {
    suspend fun collect(collector: FlowCollector<T>)
}

/** Like the real one, it refuses a block that emits in another context than the collector's. */
fun <T> flow(block: suspend FlowCollector<T>.() -> Unit): Flow<T> = object : Flow<T> {
    override suspend fun collect(collector: FlowCollector<T>) {
        val context = coroutineContext
        block(object : FlowCollector<T> {
            override suspend fun emit(value: T) {
                check(coroutineContext == context) { "emitted in another context" }
                collector.emit(value)
            }
        })
    }
}
