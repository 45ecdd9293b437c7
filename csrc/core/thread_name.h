#pragma once

#include <pthread.h>

namespace turbomill {

// What debuggers and `top -H` call the calling thread; at most 15 characters.
inline void name_thread(const char* name) {
#ifdef __linux__
    pthread_setname_np(pthread_self(), name);
#endif
}

}  // namespace turbomill
