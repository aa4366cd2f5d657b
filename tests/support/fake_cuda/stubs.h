// Definitions of a symbol of another library (`stubs.py`), whose name in C++ does not matter.
#pragma once

#include <cstdio>
#include <cstdlib>

#define VARIABLE(name, symbol, size)  \
  extern char name[] __asm__(symbol); \
  char name[size] = {};

// The description of a type, for `typeid`.
#define TYPE(name, symbol, described)        \
  extern void* const name[] __asm__(symbol); \
  void* const name[] = {class_type_info + 16, (void*)described};

// A function that returns a variable.
#define REFERENCE(name, symbol) \
  void* name() __asm__(symbol); \
  void* name() {                \
    static char variable[256];  \
    return variable;            \
  }

// A constructor. The object has a type, and virtual functions that do nothing.
#define CONSTRUCTOR(name, symbol, described)                            \
  void* const name##_type[] = {class_type_info + 16, (void*)described}; \
  void* const name##_table[] = {nullptr,       (void*)name##_type,      \
                                (void*)ignore, (void*)ignore,           \
                                (void*)ignore, (void*)ignore};          \
  void name(void* object) __asm__(symbol);                              \
  void name(void* object) { *(void* const**)object = name##_table + 2; }

// A function that nobody may call.
#define MISSING(name, symbol)                              \
  void name() __asm__(symbol);                             \
  void name() {                                            \
    std::fputs("the stand-in has no " symbol "\n", stderr); \
    std::abort();                                          \
  }

extern "C" {
extern char class_type_info[] __asm__("_ZTVN10__cxxabiv117__class_type_infoE");
static void ignore() {}
}
